"""Mutation testing: plants single-line faults and reports which test detects each: `python -m benchmarks.mutations`.

`mutations.toml` next to this file lists the faults by place, ten or more each: scheduler, coordinator, ledger,
transport, sampling, weights, experts, quantization, GGUF, tools, messages, keys and limits, explain, families. For each
place it names the nearest test files. For each fault the script copies the tree to a temporary folder, plants the fault
there, and runs tests that import `gapless` from there until one fails: first the nearest files, then all that `make
test` runs, and with `--all` those of `make test-all` too. Tests that also fail without the fault are ignored.

    python -m benchmarks.mutations               # all of them with `make test`
    python -m benchmarks.mutations --all         # with `make test-all` for those that remain undetected
    python -m benchmarks.mutations --nearest --only sampling

Prints one line per fault, then the number of faults detected per place and tier of tests. Exits with 1 if fewer than
`--least` were detected (default: all). `--nearest` takes half a minute to two minutes of one core per fault.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .support.harness import Benchmark, say
from .support.results import ROOT

FAULTS = Path(__file__).with_suffix(".toml")
_WHOLE = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")  # as `make test`
TIERS = {
    "nearest": (),  # and files
    "test": _WHOLE,
    "test-all": ("--all", "-m", "slow", *_WHOLE),
}
LIMIT_S = {"nearest": 900.0, "test": 3600.0, "test-all": 7200.0}  # timeout of a test run, which counts as a failure


@dataclass(frozen=True, slots=True)
class Fault:
    """A line of a file without indentation, its faulty replacement, and what that breaks."""

    number: int
    place: str
    file: str
    old: str
    new: str
    breaks: str


def read_faults(path: Path) -> tuple[list[Fault], dict[str, list[str]]]:
    """Read a file of faults, numbered from 1, and the nearest test files by place."""
    places = tomllib.loads(path.read_text(encoding="utf-8"))
    entries = [(place, entry) for place, table in places.items() for entry in table["fault"]]
    faults = [Fault(number, place, **entry) for number, (place, entry) in enumerate(entries, 1)]
    return faults, {place: table["nearest"] for place, table in places.items()}


class Tree:
    """A copy of the tree; its subprocesses import `gapless` from it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.root = folder / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        self._environment = os.environ | {"PYTHONPATH": str(self.root / "src"), "XDG_CACHE_HOME": str(cache)}

    def plant(self, fault: Fault) -> None:
        """Replace a line by a fault.

        Raises:
            ValueError: the line is not in the file exactly once, or the package is not imported from this copy.
        """
        path = self.root / fault.file
        lines = path.read_text(encoding="utf-8").split("\n")
        places = [place for place, line in enumerate(lines) if line.strip() == fault.old]
        if len(places) != 1:
            raise ValueError(f"{fault.file}: must contain {fault.old!r} once, not {len(places)} times")
        indent = lines[places[0]].removesuffix(fault.old)
        lines[places[0]] = indent + fault.new
        path.write_text("\n".join(lines), encoding="utf-8")
        if path.suffix == ".py" and (found := self.source_of(fault.file)) != path:
            raise ValueError(f"{fault.file}: {found} is imported instead of the faulty copy")

    def source_of(self, file: str) -> Path:
        """Return the file from which a source file's module is imported."""
        module = ".".join(("gapless", *Path(file).with_suffix("").parts))
        code = f"import gapless.runtime, importlib.util; print(importlib.util.find_spec({module!r}).origin)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=self.root, env=self._environment, capture_output=True, text=True
        )
        return Path(done.stdout.strip()).resolve()

    def first_failure(self, tier: str, arguments: Sequence[str]) -> str | None:
        """Run tests until one fails, and return it; None if all pass.

        Raises:
            RuntimeError: pytest ran no test or failed otherwise.
        """
        command = [sys.executable, "-m", "pytest", "-x", "-rfE", "-p", "no:cacheprovider", *TIERS[tier], *arguments]
        pytest = subprocess.Popen(
            command,
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = pytest.communicate(timeout=LIMIT_S[tier])
        except subprocess.TimeoutExpired:
            return f"no end after {LIMIT_S[tier]:g} s"
        finally:
            if pytest.returncode is None:
                os.killpg(pytest.pid, signal.SIGKILL)
                pytest.wait()
        if pytest.returncode == 0:
            return None
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        if not failed:
            raise RuntimeError(f"pytest ended with {pytest.returncode}:\n{output[-2000:]}")
        return str(failed[0])


class Outcome(NamedTuple):
    """The tier and the first test that detected a fault; "" if none did."""

    fault: int
    place: str
    file: str
    breaks: str
    tier: str
    test: str
    seconds: float


class Hunt:
    """Plants each fault in its own copy of the tree and runs tests on it.

    Args:
        nearest: test files by place.
        tiers: tests to run, in this order.
        folder: empty, for copies.
    """

    def __init__(self, nearest: dict[str, list[str]], tiers: Sequence[str], folder: Path) -> None:
        self._nearest = nearest
        self._tiers = tiers
        self._folder = folder
        self._cache = folder / "cache"  # keeps builds of faulty sources out of the user's cache
        own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gapless"
        if own.is_dir():
            shutil.copytree(own, self._cache / "gapless")
        self._sound = Tree(folder / "sound", self._cache)
        self._unsound: set[str] = set()  # tests that fail without a fault
        self._lock = threading.Lock()

    def outcome(self, fault: Fault) -> Outcome:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            tree = Tree(Path(folder), self._cache)
            tree.plant(fault)
            found = next(((tier, test) for tier in self._tiers if (test := self._noticed(tree, tier, fault))), ("", ""))
        return Outcome(fault.number, fault.place, fault.file, fault.breaks, *found, time.monotonic() - begin)

    def _noticed(self, tree: Tree, tier: str, fault: Fault) -> str | None:
        """Return the first test of a tier that fails with the fault and passes without it."""
        files = self._nearest[fault.place] if tier == "nearest" else []
        while True:
            left_out = [f"--deselect={test}" for test in sorted(self._unsound)]
            test = tree.first_failure(tier, [*files, *left_out])
            if test is None or test.startswith("no end"):
                return test
            with self._lock:
                if self._sound.first_failure("nearest", ["--all", test]) is None:
                    return test
                self._unsound.add(test)
                say(f"fails without a fault too: {test}")


def outcomes_of(hunt: Hunt, faults: Sequence[Fault], jobs: int) -> Iterator[Outcome]:
    """Print and yield the outcome of each fault, in order."""
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(hunt.outcome, faults):
            noticed = f"{outcome.tier:<8} {outcome.test}" if outcome.tier else "SURVIVES"
            where = f"{outcome.place:<12} {outcome.file}: {outcome.breaks}"
            print(f"{outcome.fault:>3} {outcome.seconds:5.0f} s  {where}  {noticed}", flush=True)
            yield outcome


def main() -> int:
    bench = Benchmark(
        __doc__,
        only={"metavar": "PLACE", "help": "faults of one place"},
        fault={"type": int, "metavar": "N", "help": "one fault, by its number"},
        nearest={"action": "store_true", "help": "run only the nearest files"},
        all={"action": "store_true", "help": "also run the slow tests if no other test detects the fault"},
        least={"type": int, "metavar": "N", "help": "faults that must be detected; default: all"},
        jobs={"type": int, "default": 1, "metavar": "N", "help": "parallel jobs"},
        faults={"type": Path, "default": FAULTS, "metavar": "FILE", "help": "other faults than mutations.toml's"},
    )
    given = bench.given
    faults, nearest = read_faults(given.faults)
    if given.only is not None and given.only not in nearest:
        bench.parser.error(f"--only {given.only}: must be one of {', '.join(nearest)}")
    chosen = [fault for fault in faults if given.only in (None, fault.place)]
    chosen = [fault for fault in chosen if given.fault in (None, fault.number)]
    tiers = list(TIERS)[: 1 if given.nearest else 3 if given.all else 2]
    with tempfile.TemporaryDirectory(prefix="gapless-mutations-") as folder:
        outcomes = list(outcomes_of(Hunt(nearest, tiers, Path(folder)), chosen, given.jobs))
    for place in [*dict.fromkeys(outcome.place for outcome in outcomes), "all"]:
        by_tier = Counter(outcome.tier for outcome in outcomes if place in (outcome.place, "all"))
        bench.row("places", place=place, faults=by_tier.total(), **{tier: by_tier[tier] for tier in tiers})
    bench.tables["faults"] = [each._asdict() for each in outcomes]
    noticed = sum(bool(outcome.tier) for outcome in outcomes)
    least = len(chosen) if given.least is None else given.least
    print(f"\n{noticed} of {len(chosen)} are detected; {least} must be")
    return bench.end(noticed >= least, hidden=["faults"])


if __name__ == "__main__":
    sys.exit(main())
