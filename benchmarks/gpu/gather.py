"""Collects the wheels that `first` needs, for a GPU machine without a network.

`python -m benchmarks.gpu gather FOLDER`, with that machine's Python version; it prints sizes and how to install.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

from ..support.results import ROOT

# Requirements that are only for Ray, figures or a server.
NOT_NEEDED = ("ray", "matplotlib", "starlette", "pydantic", "uvicorn", "httptools", "prometheus_client")
THERE = "+there"  # local version of an installed package; no index has it
MORE = ("pytest", "hypothesis", "transformers")  # for the tests, and tokenizers


def main(arguments: list[str]) -> int:
    """Collect the wheels; return 1 if pip failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu gather", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--pins", default="constraints.txt", help="constraints-cuda12.txt for drivers of CUDA 12")
    parser.add_argument(
        "--there",
        default="",
        metavar="NAME==VERSION,...",
        help="installed packages; they and their own requirements are left out, and the others must be compatible",
    )
    options = parser.parse_args(arguments)
    there = [pin for pin in options.there.split(",") if pin]
    if bad := [pin for pin in there if "==" not in pin]:
        parser.error(f"--there {','.join(bad)}: each is NAME==VERSION")
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        stubs = [stub(pin, work) for pin in there]
        pins = constraints(ROOT / options.pins, there)
        exact = [f"{pin.replace('==', '===')}{THERE}" for pin in there]
        (work / "pins.txt").write_text("\n".join([*pins, *exact]) + "\n", encoding="utf-8")
        pip = (sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--wheel-dir", str(folder))
        own = subprocess.run((*pip, "--no-deps", str(ROOT)), check=False).returncode
        wanted = requirements(is_cuda12="cuda12" in options.pins)
        done = subprocess.run(
            (*pip, "--constraint", str(work / "pins.txt"), "--find-links", str(work), *wanted), check=False
        ).returncode
    if own or done:
        print("benchmarks.gpu gather: pip failed; its lines above say at what", file=sys.stderr)
        return 1
    for stub_name in stubs:
        (folder / stub_name).unlink(missing_ok=True)
    wheels = sorted(folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:8.1f} MiB  {wheel.name}")
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{total / 2**20:8.1f} MiB  {len(wheels)} wheels for Python {sys.version_info[0]}.{sys.version_info[1]}")
    print(f"there: python -m pip install --no-index --no-deps {folder}/*.whl && python -m benchmarks.gpu first")
    return 0


def requirements(is_cuda12: bool) -> list[str]:
    """Return the requirements of `first`: of the project and of its tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tests = [text for text in extras["test"] if name_of(text) in MORE]
    needed = [text for text in project["dependencies"] if name_of(text) not in NOT_NEEDED]
    return [*needed, *tests, *(extras["xformers"] if is_cuda12 else [])]


def constraints(path: Path, there: list[str]) -> list[str]:
    """Return the pins of a file and its includes, except for installed packages."""
    names, pins = {name_of(pin) for pin in there}, list[str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("-c "):
            pins += constraints(path.parent / line.removeprefix("-c "), there)
        elif not line.startswith("#") and name_of(line) not in names:
            pins.append(line)
    return pins


def name_of(requirement: str) -> str:
    """Return a requirement's package name, normalized as in wheel names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "_", found[0]).lower()


def stub(pin: str, folder: Path) -> str:
    """Write an empty wheel of an installed package, so that pip resolves against its version; return its name."""
    name, version = name_of(pin), pin.partition("==")[2].strip() + THERE
    info, wheel = f"{name}-{version}.dist-info", f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / wheel, "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: gapless\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return wheel
