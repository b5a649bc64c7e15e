"""`gapless profile import FOLDER`: constants of a device, fitted to tables of its operators that others publish."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..conf.errors import ConfigError
from ..conf.profiling import ProfileConfig
from ..conf.user_path import user_path

if TYPE_CHECKING:
    from ..runtime.profiling.measurements import OperatorTables

_LACKING = ("pointwise", "node", "network", "host", "eager_host")  # constants that no table of operators shows


def arguments_of(words: list[str]) -> list[str]:
    """Return the overrides of a profile; `import FOLDER` is import=FOLDER, whose constants go to profiles/HARDWARE."""
    if words[:1] == ["import"] and len(words) > 1:
        words = [f"import={words[1]}", *words[2:]]
    imports = any(word.startswith("import=") for word in words)
    if imports and not any(word.startswith("hydra.run.dir=") for word in words):
        words = [*words, "hydra.run.dir=profiles/${hardware.name}"]
    return words


def read(config: ProfileConfig) -> OperatorTables:
    """Read the tables of `config.import_`.

    Raises:
        ConfigError: there is none, one is damaged, or the hardware has no constants to begin with.
    """
    from ..runtime.profiling.published import read_published

    assert config.import_ is not None
    if config.hardware.costs is None:
        raise ConfigError(f"hardware={config.hardware.name}: has no constants that a fit starts from; h200, say, has")
    device = config.hardware.name.partition("-")[0]
    return read_published(user_path(config.import_, "import"), config.hardware.attention, device)


def run(config: ProfileConfig, measured: OperatorTables, run_dir: Path) -> None:
    """Fit, print the errors on rows that were held out, and write constants that are fitted to all rows."""
    from ..runtime.cost.imported import write_imported
    from ..runtime.profiling.fitting import errors_of, fit_all

    base = config.hardware.costs
    assert base is not None
    console = Console(highlight=False)
    kept, out = measured.split()
    fitted = fit_all(kept, base)
    table = Table()
    for column in ("every third size, held out of the fit", "rows", "median error", "p90 error"):
        table.add_column(column, justify="right" if table.columns else "left")
    for row in errors_of(fitted, out):
        table.add_row(row["of"], str(row["rows"]), f"{row['median_share']:.1%}", f"{row['p90_share']:.1%}")
    console.print(table)
    final, lacking = fit_all(measured, fitted), ", ".join(_LACKING)
    write_imported(run_dir, replace(config.hardware, costs=final), f"{config.import_}; {lacking} are those of before")
    console.print(f"tables lack {lacking}: they are those of hardware={config.hardware.name}", soft_wrap=True)
    console.print(f"gapless simulate hardware={config.hardware.name} simulation.profile={run_dir}", soft_wrap=True)
