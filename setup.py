"""Compiles the kernels that a wheel brings, for every level of its machine. What else is built is in pyproject.toml.

CXX may name a cross compiler: the wheel is then for its machine. GAPLESS_KERNELS=native makes a wheel with those of
this processor's level alone, and GAPLESS_KERNELS=none one without, for any machine. An editable install compiles
nothing: `python setup.py kernels` compiles those of this processor into the user's cache, with Python alone.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gapless.kernels.processor import Level

_PACKAGE = Path(__file__).parent / "src" / "gapless"
_ROOMS = ("conf", "kernels", "parallel", "models", "runtime", "launch")
_VARIABLE = "GAPLESS_KERNELS"  # all (where it is not set), native or none


def main() -> None:
    """Compile kernels, or have setuptools do what the command line says."""
    _link_rooms()
    package = types.ModuleType("gapless")  # without what it needs to run
    package.__path__ = [str(_PACKAGE)]
    sys.modules["gapless"] = package
    from gapless.kernels import cpp_build, processor

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if sys.argv[1:] == ["kernels"]:
        try:
            cpp_build.compile_missing(cpp_build.kernels(processor.levels()[-1:]))
        except (cpp_build.NoLibraryError, OSError, RuntimeError) as error:
            sys.exit(f"kernels are not compiled: {error}")
        return
    _set_up(machine := _machine(), _levels(machine))


def _link_rooms() -> None:
    """Link the package's rooms to those at the root where no links are: an sdist has none, some checkouts files."""
    for room in _ROOMS:
        if not (link := _PACKAGE / room).is_dir():
            link.unlink(missing_ok=True)  # the text of a link, where Git is not allowed to make links
            link.symlink_to(Path("..", "..", room))


def _machine() -> str:
    """Return the machine that the compiler compiles for, as Python names it."""
    if compiler := os.environ.get("CXX"):
        with suppress(OSError):  # it fails again where there is a wheel to be made
            done = subprocess.run([*shlex.split(compiler), "-dumpmachine"], capture_output=True, text=True)
            return done.stdout.partition("-")[0]
    return platform.machine()


def _levels(machine: str) -> list[Level]:
    """Return the levels that kernels are compiled for."""
    from gapless.kernels import processor

    asked = os.environ.get(_VARIABLE, "all")
    choices = {"all": [level for level in processor.LEVELS if level.machine == machine], "none": []}
    choices["native"] = [*processor.levels()[-1:]]
    if asked not in choices:
        sys.exit(f"{_VARIABLE}={asked}: must be one of {', '.join(choices)}")
    return choices[asked] if sys.platform == "linux" else []


def _set_up(machine: str, levels: list[Level]) -> None:
    from setuptools import setup
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build_py import build_py

    from gapless.kernels import cpp_build

    class BuildWithKernels(build_py):
        def run(self) -> None:
            super().run()
            target = Path(self.build_lib, "gapless/kernels/built")
            shutil.rmtree(target, ignore_errors=True)  # of another build
            if self.editable_mode or not levels:
                return
            kernels = cpp_build.kernels(levels)
            try:
                cpp_build.compile_missing(kernels)
                for kernel in kernels:
                    (target / kernel.level.name).mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(kernel.find(), target / kernel.level.name / kernel.file)
            except (cpp_build.NoLibraryError, OSError, RuntimeError) as error:
                sys.exit(f"the wheel's kernels are not compiled: {error}; {_VARIABLE}=none makes a wheel without them")

    class TaggedWheel(bdist_wheel):
        def finalize_options(self) -> None:
            if levels:
                self.distribution.has_ext_modules = lambda: True  # it is for one machine
                self.plat_name = self.plat_name or f"linux_{machine}"
            super().finalize_options()

        def get_tag(self) -> tuple[str, str, str]:
            _, _, platform_tag = super().get_tag()
            return "py3", "none", platform_tag

    setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": TaggedWheel})


if __name__ == "__main__":
    main()
