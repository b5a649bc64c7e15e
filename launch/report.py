"""`gapless report`: writes the report of one run folder again, or the comparison of several."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ..conf.errors import ConfigError, nearest
from ..conf.schema import ReportConfig
from ..conf.user_path import user_path
from . import import_traces
from .output_path import check_folder, new_folder
from .progress import print_files, print_words, shown, throughput
from .prompts import StandardInput
from .results import show_tables, show_words

if TYPE_CHECKING:
    from ..runtime.analysis.run_folder.read import RunFolder
    from ..runtime.analysis.traces.pipeline_run import ImportedRun

NEW_FOLDER = "comparison"
_MOST_BLAMED, _MOST_MOMENTS = 3, 3  # of a run, that the terminal shows
SWEEP = "multirun.yaml"  # the file in a sweep's own folder


def prepare(config: ReportConfig, stdin: StandardInput) -> list[RunFolder] | ImportedRun:
    """Check and read the folders, or the traces to import, before anything is written.

    Raises:
        ConfigError: a folder does not exist or has no run in it, `sort` is unknown, or `out` cannot be written to.
    """
    if config.import_ is not None:
        return import_traces.read(config)
    from ..runtime.analysis.report.metrics import number_keys

    found = folders(config.runs)
    keys = dict.fromkeys([ReportConfig().sort, *(key for folder in found for key in number_keys(folder.summary))])
    if config.slo != type(config.slo)():
        keys["request_goodput"] = None
    if len(found) > 1 and config.sort not in keys:
        hint = nearest(config.sort, keys)
        raise ConfigError(f"sort={config.sort}: no number of these runs' summary.json{hint}")
    if config.out is not None:
        check_folder(user_path(config.out, "out"), "out")
    return found


def run(config: ReportConfig, found: Sequence[RunFolder] | ImportedRun, run_dir: Path) -> None:
    """Write the report of one run, or the comparison of several, and print it as text.

    Imported traces become a run folder first.

    Raises:
        ValueError: what the user can correct; also a damaged run folder.
    """
    from ..runtime.analysis.drawing.page_parts import error_notes
    from ..runtime.analysis.report.comparison_table import comparison_table
    from ..runtime.analysis.report.run_groups import group_runs
    from ..runtime.analysis.report.write_comparison import write_comparison

    console = Console(highlight=False)
    if not isinstance(found, Sequence):
        _show_one(console, config, import_traces.write(config, found))
        return
    if len(found) == 1:
        _show_one(console, config, found[0])
        return
    candidates = group_runs([_with_goodput(folder, config) for folder in found], _names(config.runs))
    path = _destination(config)
    write_comparison(path, candidates, figures=config.figures, sort=config.sort)
    console.print(comparison_table(candidates, sort=config.sort))
    for note in error_notes(folder.summary for folder in found):
        print_words(console, Text(note))
    if len(candidates) == 2:
        base, other = (shown(candidate.median_run.path) for candidate in candidates)
        line = f"to see which causes, stages and requests make the change: gapless diff {base} {other}"
        console.print(Text(line), soft_wrap=True)
    _print_paths(console, path, figures=config.figures, numbers=True)


def compare_sweep(folder: str) -> None:
    """Write the comparison of a sweep's runs into its folder and print it, if there are two or more."""
    if len(list(_run_folders_below(Path(folder)))) > 1:
        config = ReportConfig(runs=(folder,))
        run(config, folders(config.runs), Path.cwd())


def folders(paths: Sequence[str]) -> list[RunFolder]:
    """Read the runs of `paths`, each a run folder or a folder that holds run folders at any depth.

    The runs of a path are ordered by date; those of a sweep, by number.

    Raises:
        ConfigError: a path is neither.
    """
    from ..runtime.analysis.run_folder.read import is_run_folder, read_run_folder

    if not paths:
        raise ConfigError("runs: give one or more run folders, as in gapless report runs/DATE_TIME")
    found: dict[Path, RunFolder] = {}
    for text in paths:
        path = user_path(text)
        if not path.is_dir():
            raise ConfigError(f"{text}: {'not a folder' if path.exists() else 'no such folder'}")
        inside = [path] if is_run_folder(path) else sorted(_run_folders_below(path), key=_natural)
        if not inside:
            raise ConfigError(f"{text}: not a run folder, and contains none")
        read = [read_run_folder(folder) for folder in inside]
        if not (path / SWEEP).is_file():  # a sweep's runs stay in the order of their numbers: they may run side by side
            read.sort(key=lambda folder: str(folder.summary.get("date", "")))
        for folder in read:
            found.setdefault(folder.path.resolve(), folder)
    return list(found.values())


def _names(paths: Sequence[str]) -> dict[Path, str]:
    """Return the names that users gave to run folders, by path; gapless's own begin with a digit."""
    names = {path: path.absolute().name for path in map(user_path, paths) if not path.absolute().name[:1].isdigit()}
    return {path: name if [*names.values()].count(name) == 1 else str(path) for path, name in names.items()}


def _run_folders_below(path: Path) -> Iterator[Path]:
    """Yield the run folders at any depth below `path`, but not the replicas of a fleet, which are part of its run."""
    from ..runtime.analysis.run_folder.read import is_run_folder

    for summary in path.rglob("summary.json"):
        folder = summary.parent
        if is_run_folder(folder) and not is_run_folder(folder.parent):
            yield folder


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Return a sort key that puts 2 before 10."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def _with_goodput(folder: RunFolder, config: ReportConfig) -> RunFolder:
    """Add the goodput within the config's SLO to the summary, if there is an SLO. This reads the run's record."""
    if config.slo == type(config.slo)():
        return folder
    from ..runtime.analysis.explain.analysed_run import AnalysedRun

    run = AnalysedRun.read(folder, config.slo)
    return replace(folder, summary=run.summary)


def _destination(config: ReportConfig) -> Path:
    """Choose the folder of a comparison: `out`, the one folder given, or a new one next to the first of several."""
    if config.out is not None:
        return user_path(config.out, "out")
    first = user_path(config.runs[0])
    if len(config.runs) == 1:
        return first
    return new_folder(first, NEW_FOLDER)


def _show_one(console: Console, config: ReportConfig, folder: RunFolder) -> None:
    from ..runtime.analysis.explain.analysed_run import AnalysedRun
    from ..runtime.analysis.report.blame_section import blame_table
    from ..runtime.analysis.report.moments_section import moment_text
    from ..runtime.analysis.report.write_folder import write_report

    run = AnalysedRun.read(folder, config.slo)
    summary = run.summary
    path = folder.path if config.out is None or config.import_ is not None else user_path(config.out, "out")
    path.mkdir(parents=True, exist_ok=True)
    write_report(path, run, figures=config.figures)
    print_words(console, Text(folder.title, "bold"))
    print_words(console, Text(throughput(summary) if run.knows_requests else import_traces.said(summary)))
    show_words(console, run.words)
    show_tables(console, summary, run.fleet, run.causes)
    if run.knows_requests and not run.fleet.is_several:
        if blamed := blame_table(run.record, run.blame, _MOST_BLAMED):
            console.print(blamed)
        for moment in run.moments[:_MOST_MOMENTS]:
            print_words(console, Text(" ".join(moment_text(moment, run.record, run.ledger.t0))))
    for line in _remarks(summary):
        print_words(console, Text(line))
    _print_paths(console, path, figures=config.figures, numbers=False)


def _remarks(summary: dict[str, Any]) -> Iterator[str]:
    from ..runtime.analysis.drawing.page_parts import error_notes

    error = summary.get("prediction_error")
    if error:
        yield f"predicted stage times are off by {error['median']:.1%} (p50), {error['p90']:.1%} (p90)"
    if "request_goodput" in summary:
        yield f"goodput: {summary['request_goodput']:.2f} of {summary['request_throughput']:.2f} requests/s met the SLO"
    yield from summary.get("notes") or ()
    yield from error_notes([summary])


def _print_paths(console: Console, path: Path, *, figures: bool, numbers: bool) -> None:
    lines = [("numbers", path / "comparison.csv")] if numbers else []
    lines += [("figures", path / "figures")] if figures else []
    print_files(console, *lines, ("report", path / "report.html"))
