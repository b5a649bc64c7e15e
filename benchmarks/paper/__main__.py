"""Runs the paper's experiments and makes `docs/paper.md` of them: `python -m benchmarks.paper [NAME] [KEY=VALUE] ...`.

Each experiment prints its table, and leaves `paper.json`, `paper.md` and its plots in `runs/paper/NAME`; without names
all of them run. Keys are those of `gapless simulate`, over the experiment's own; such runs go to `runs/paper_other`.
Without keys, the page and its pictures are then made of these folders. `--write` only makes the page.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from gapless.conf.errors import ConfigError

from . import EXPERIMENTS, Row, config_of
from .run import run

RUNS = Path("runs/paper")
OTHER_RUNS = Path("runs/paper_other")  # with keys of the user's own, which no page is made of
PAGE = Path("docs/paper.md")
IMAGES = Path("docs/images")

HEAD = """\
# The paper's evaluation, simulated

SARATHI's tables and figures ([arXiv 2308.16369](https://arxiv.org/abs/2308.16369), sections 3 to 5), run again by this
project's coordinator, schedulers and ledger over simulated GPUs. In a clone of the repository `make paper` runs all
and writes this page; one is

```sh
python -m benchmarks.paper figure12
```

which prints its table, and leaves the same as `paper.json` with the plots in `runs/paper/figure12`. Keys of `gapless
simulate` hold over the experiment's own, and the files are then in `runs/paper_other`: `workload.num_prompts=500` is a
quick look.

**How to read it.** The paper's numbers are those of its text and tables; of what only its plots show there is no number
here. Ours come from the cost model ([cost_model.md](cost_model.md)). The A100's constants are fitted to published
measurements of operators, to nothing on this page. The A6000's are fitted to Table 2 and Figure 7 themselves, as
`conf/hardware/a6000.yaml` says line by line: those two show the fit, the other figures what it foretells. Unless a row
says otherwise the host's overhead is left out. A row without a number of the paper stands beside the others for
comparison; where the paper's is a bound (≤, ≥), ours holds or the deviation says by how much it does not.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.paper", description=__doc__.partition(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME or KEY=VALUE", help=", ".join(EXPERIMENTS))
    parser.add_argument("--write", action="store_true", help="make the page of runs that are there")
    given = parser.parse_intermixed_args(arguments)
    overrides = [word for word in given.names if "=" in word]
    names = [word for word in given.names if "=" not in word]
    try:
        configs = {name: config_of(name, overrides) for name in names or EXPERIMENTS}
        if not given.write:
            for name, config in configs.items():
                run(name, config, (OTHER_RUNS if overrides else RUNS) / name)
    except ConfigError as error:
        parser.error(str(error))
    missing = [name for name in EXPERIMENTS if not (RUNS / name / "paper.md").is_file()]
    if overrides or missing:
        print("no page: " + ("other keys" if overrides else f"not run yet: {', '.join(missing)}"), file=sys.stderr)
        return 0 if overrides else 1
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


def page() -> str:
    """Return the text of the page, all experiments in the paper's order; copies their pictures to `docs/images`."""
    sections = []
    for name in EXPERIMENTS:
        folder = RUNS / name
        text = (folder / "paper.md").read_text(encoding="utf-8")
        for picture in re.findall(r"\]\((\w+\.png)\)", text):
            shutil.copyfile(folder / picture, IMAGES / f"paper_{picture}")
        sections.append(re.sub(r"\]\((\w+\.png)\)", r"](images/paper_\1)", text))
    return "\n".join([HEAD, overview(), *sections])


def overview() -> str:
    """Return a table of how far our numbers are from the paper's, by artifact."""
    lines = ["| | numbers of the paper | deviation of ours, median | largest |", "| --- | ---: | ---: | ---: |"]
    for name in EXPERIMENTS:
        rows = [Row(**row) for row in json.loads((RUNS / name / "paper.json").read_text(encoding="utf-8"))]
        deviations = [deviation for row in rows if (deviation := row.deviation) is not None]
        median, largest = statistics.median(map(abs, deviations)), max(deviations, key=abs)
        lines.append(f"| {rows[0].artifact} | {len(deviations)} | {median:.1%} | {largest:+.1%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
