"""The control path as compiled code: the same runs, and never of sources that have been edited since."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from gapless.conf.policies import POLICY_CONFIGS
from gapless.runtime import compiled
from tests.support.tiers import HANGS_S

RUN = """
import sys, hashlib
sys.path.insert(0, sys.argv[1])
from gapless.conf.policies import POLICY_CONFIGS
from gapless.runtime import compiled
from tests.support.simulated_parts import items, make_replica, run
print(compiled.in_use())
for policy in POLICY_CONFIGS:
    replica = make_replica(policy, layers=(2, 2, 2), batch=4, depth=3, num_blocks=60)
    run(replica, items(*[(7 + 31 * n % 57, 1 + 13 * n % 29, 0.01 * n) for n in range(40)]))
    record = replica.record
    spans = [(s.micro_batch, s.stage, s.ready, s.input, s.begin, s.end, s.sent) for s in record.spans]
    rows = [(r.first_dispatched, r.finished, r.preemptions, r.token_times) for r in record.requests]
    print(policy, hashlib.sha256(repr((spans, rows)).encode()).hexdigest())
"""


def output(**environment: str) -> list[str]:
    command = [sys.executable, "-c", RUN, str(Path(__file__).parents[2])]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not compiled.folder().is_dir(), reason="nothing is compiled: python -m gapless.launch.compile")
def test_every_policy_runs_the_same_compiled_and_from_its_sources() -> None:
    used, *runs = output(GAPLESS_COMPILED="1")
    unused, *others = output(GAPLESS_COMPILED="0")
    assert (used, unused) == ("True", "False")
    assert len(runs) == len(POLICY_CONFIGS)
    assert runs == others


def test_an_edited_source_has_another_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiled.folder()
    for room in ("conf", "kernels", "models", "parallel", "runtime"):
        original = Path(compiled.__file__).parents[1] / room
        shutil.copytree(original, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    monkeypatch.setattr(compiled, "_PACKAGE", tmp_path)
    assert compiled.folder() == before
    edit(tmp_path / "runtime" / "analysis" / "report" / "run_page.py")
    assert compiled.folder() == before
    edit(tmp_path / "runtime" / "scheduler" / "base.py")
    compiled_itself = compiled.folder()
    assert compiled_itself != before
    edit(tmp_path / "conf" / "sampling.py")  # compiled modules import it: types come from there
    assert compiled.folder() not in (before, compiled_itself)


def edit(source: Path) -> None:
    with source.open("a") as file:
        file.write("# edited\n")


def test_what_nothing_has_run_for_a_month_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled.unused() == []
    cache = tmp_path / "gapless"
    long_ago = time.time() - 40 * 86_400
    for name in ("a" * 20, "b" * 20, "c" * 20, "d" * 19):
        (cache / name).mkdir(parents=True)
        (cache / name / "code.so").write_bytes(b"code")
        if name[0] != "c":  # of a form that noted no sizes
            compiled.seal(cache / name)
            os.utime(cache / name / compiled.SIZES, (long_ago, long_ago))
        os.utime(cache / name, (long_ago, long_ago))
    compiled._note_use(cache / ("b" * 20))
    assert sorted(path.name[0] for path in compiled.unused()) == ["a", "c"]


def test_another_librt_has_another_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiled.folder()  # what was compiled against one may not load with another
    monkeypatch.setattr(compiled, "version", lambda package: f"{package} of another day")
    assert compiled.folder() != before


@pytest.mark.skipif(not compiled.folder().is_dir(), reason="nothing is compiled: python -m gapless.launch.compile")
@pytest.mark.parametrize("what", ["library", "module", "list"])
def test_the_sources_run_where_their_twin_is_damaged(what: str, tmp_path: Path) -> None:
    assert compiled.damage(compiled.folder()) == ""
    twin = tmp_path / "gapless" / compiled.folder().name
    shutil.copytree(compiled.folder(), twin)
    if what == "library":  # cut short: to load it would end the process
        (damaged,) = twin.glob(f"{compiled.LIBRARY}*")
        os.truncate(damaged, 5000)
    else:
        (damaged,) = twin.rglob("coordinator*") if what == "module" else (twin / compiled.SIZES,)
        damaged.unlink()
    assert damaged.name in compiled.damage(twin)
    code = "from gapless.runtime import compiled; import gapless.runtime.engine.coordinator; print(compiled.in_use())"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS_S, check=True)
    assert done.stdout == "False\n"
    assert "python -m gapless.launch.compile repairs them" in done.stderr


def test_what_is_written_for_the_compiler_is_marked() -> None:
    package = Path(compiled.__file__).parents[1]
    marked = compiled.marked_sources()
    assert Path("runtime/engine/coordinator.py") in marked
    written_for_it = [
        path.relative_to(package)
        for path in (package / "runtime").rglob("*.py")
        if any(line.startswith(("from mypy_extensions", "from librt")) for line in path.read_text().splitlines())
    ]
    assert written_for_it
    assert set(written_for_it) <= set(marked)


@pytest.mark.skipif(not compiled.folder().is_dir(), reason="nothing is compiled: python -m gapless.launch.compile")
def test_what_is_marked_is_compiled_and_nothing_else() -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built = [
        path.relative_to(compiled.folder() / "gapless") for path in compiled.folder().glob(f"gapless/**/*{suffix}")
    ]
    assert sorted(str(path).removesuffix(suffix) for path in built) == sorted(
        str(source.with_suffix("")) for source in compiled.marked_sources()
    )


def test_without_a_compiler_one_line_says_so_and_all_runs_as_before(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CC": "no-such-compiler"}
    command = [sys.executable, "-m", "gapless.launch.compile"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("cannot compile the control path, which runs in Python:")
    assert "no-such-compiler" in line
    assert list(tmp_path.iterdir()) == []
    assert output(XDG_CACHE_HOME=str(tmp_path))[0] == "False"
