"""Runs the paper's experiments and writes `docs/paper.md`: `python -m benchmarks.paper [NAME] [KEY=VALUE] ...`.

Each experiment prints its table and writes `paper.json`, `paper.md` and its plots to `runs/paper/NAME`; without names
all of them run. Keys are overrides of `gapless simulate`; such runs go to `runs/paper_other`. Without keys, the page
and its pictures are then made from these folders. `--write` only writes the page.
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
OTHER_RUNS = Path("runs/paper_other")  # with overrides, not used for the page
PAGE = Path("docs/paper.md")
IMAGES = Path("docs/images")

HEAD = """\
# The paper's evaluation, simulated

SARATHI's tables and figures ([arXiv 2308.16369](https://arxiv.org/abs/2308.16369), sections 3 to 5), reproduced with
this project's coordinator, schedulers and ledger on simulated GPUs. In a clone of the repository, `make paper` runs
all experiments and writes this page. To run one:

```sh
python -m benchmarks.paper figure12
```

This prints its table, and writes `paper.json` and the plots into `runs/paper/figure12`. Keys of `gapless simulate`
override the experiment's own, and the files are then in `runs/paper_other`. For a quick look, add
`workload.num_prompts=500`.

**How to read it.** The paper's numbers come from its text and tables; values that only its plots show are not
included. Ours come from the cost model ([cost_model.md](cost_model.md)). The A100's constants are fitted to published
measurements of operators, not to this page. The A6000's are fitted to Table 2 and Figure 7, as documented line by line
in `conf/hardware/a6000.yaml`: these two show the fit, the other figures are predictions. Host overhead is left out
unless a row states otherwise. Rows without a paper value are for comparison. If the paper's value is a bound (≤, ≥),
the deviation shows by how much ours violates it.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.paper", description=__doc__.partition(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME or KEY=VALUE", help=", ".join(EXPERIMENTS))
    parser.add_argument("--write", action="store_true", help="only write the page, from existing runs")
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
    """Return the page's text, with all experiments in the paper's order; copy their pictures to `docs/images`."""
    sections = []
    for name in EXPERIMENTS:
        folder = RUNS / name
        text = (folder / "paper.md").read_text(encoding="utf-8")
        for picture in re.findall(r"\]\((\w+\.png)\)", text):
            shutil.copyfile(folder / picture, IMAGES / f"paper_{picture}")
        sections.append(re.sub(r"\]\((\w+\.png)\)", r"](images/paper_\1)", text))
    return "\n".join([HEAD, overview(), *sections])


def overview() -> str:
    """Return a table of our deviations from the paper, by artifact."""
    lines = ["| | numbers of the paper | deviation of ours, median | largest |", "| --- | ---: | ---: | ---: |"]
    for name in EXPERIMENTS:
        rows = [Row(**row) for row in json.loads((RUNS / name / "paper.json").read_text(encoding="utf-8"))]
        deviations = [deviation for row in rows if (deviation := row.deviation) is not None]
        median, largest = statistics.median(map(abs, deviations)), max(deviations, key=abs)
        lines.append(f"| {rows[0].artifact} | {len(deviations)} | {median:.1%} | {largest:+.1%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
