"""The faults that `benchmarks.mutations` plants can still be planted: lines move, and files are renamed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.mutations import FAULTS, Tree, read_faults
from benchmarks.support.results import ROOT

FOUND, NEAREST = read_faults(FAULTS)


@pytest.mark.parametrize("file", sorted({fault.file for fault in FOUND}))
def test_each_line_stands_once_and_what_replaces_it_compiles(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = text.split("\n")
    for fault in (each for each in FOUND if each.file == file):
        places = [place for place, line in enumerate(lines) if line.strip() == fault.old]
        assert len(places) == 1, f"{file} has {fault.old!r} {len(places)} times; update benchmarks/mutations.toml"
        assert fault.old != fault.new
        if file.endswith(".py"):
            (place,) = places
            indent = lines[place].removesuffix(fault.old)
            compile("\n".join([*lines[:place], indent + fault.new, *lines[place + 1 :]]), file, "exec")


def test_each_place_has_ten_faults_and_tests_that_are_there() -> None:
    assert min(Counter(fault.place for fault in FOUND).values()) >= 10
    assert len({(fault.file, fault.old, fault.new) for fault in FOUND}) == len(FOUND)
    for place, files in NEAREST.items():
        assert files, place
        assert all((ROOT / file).exists() for file in files), place


def test_a_fault_is_planted_in_a_copy_that_is_what_runs(tmp_path: Path) -> None:
    """The sources of this tree stay, and a line that is not there is refused."""
    tree, fault = Tree(tmp_path, tmp_path / "cache"), FOUND[0]
    tree.plant(fault)
    assert tree.source_of(fault.file) == (tree.root / fault.file).resolve()
    assert fault.old not in [line.strip() for line in (tree.root / fault.file).read_text().split("\n")]
    assert fault.old in [line.strip() for line in (ROOT / fault.file).read_text().split("\n")]
    with pytest.raises(ValueError, match=r"must contain .* once, not 0 times"):
        tree.plant(fault)
