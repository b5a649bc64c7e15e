"""`python -m gapless.launch.compile` compiles the control path to C with mypyc, in about a minute.

Simulations then run 2.5 to 3 times as fast. The coordinator of real runs is compiled too. Edited sources run in Python
until they are compiled again. Requires a C compiler and mypy (`pip install '.[compile]'`, in a checkout).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from ..runtime import compiled

_SETTINGS = """[mypy]
follow_imports = silent
ignore_missing_imports = True
explicit_package_bases = True
namespace_packages = True
[mypy-hydra.*,numpy.*,omegaconf.*,ray.*,safetensors.*,tokenizers.*,torch.*,transformers.*]
follow_imports = skip
follow_imports_for_stubs = True
"""
_SETUP = """
from setuptools import setup
from mypyc.build import mypycify
setup(name="gapless_control", packages=[], ext_modules=mypycify(
    ["--config-file=mypy.ini", *{files!r}], opt_level="3", debug_level="0", group_name={group!r}))
"""


def main() -> int:
    """Compile the control path unless it is up to date. Return the exit code."""
    try:
        target = compiled.folder()
    except (OSError, RuntimeError) as error:
        return _say_not_compiled(str(error))
    if not compiled.damage(target):
        print(f"the control path is compiled: {target}")
        return 0
    print("compiling the control path (about a minute)", flush=True)
    try:
        if target.is_dir():
            shutil.rmtree(target)
        _compile(target)
    except (OSError, subprocess.SubprocessError) as error:
        return _say_not_compiled(str(error))
    print(f"compiled: {target}")
    for old in compiled.unused():
        shutil.rmtree(old, ignore_errors=True)
    return 0


def _compile(target: Path) -> None:
    """Compile the marked modules into the folder `target`.

    Raises:
        OSError: the disk is full.
        SubprocessError: mypy or the C compiler is missing or failed; the message is its last line of output.
    """
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:  # check now: mypyc calls the compiler only after half a minute
        raise subprocess.SubprocessError(f"C compiler {compiler} not found")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        root = Path(work, "gapless")
        rooms = Path(compiled.__file__).parents[1]
        python_only = shutil.ignore_patterns("shipped", "__pycache__", "*.pyc")
        for room in ("conf", "kernels", "models", "parallel", "runtime"):
            shutil.copytree(rooms / room, root / room, ignore=python_only)
        files = [str("gapless" / source) for source in compiled.marked_sources()]
        Path(work, "mypy.ini").write_text(_SETTINGS)
        group = compiled.LIBRARY.removesuffix("__mypyc")
        Path(work, "setup.py").write_text(_SETUP.format(files=files, group=group))
        build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "built"]
        done = subprocess.run(build, cwd=work, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise subprocess.SubprocessError(lines[-1] if lines else f"exit code {done.returncode}")
        compiled.seal(Path(work, "built"))
        try:
            os.replace(Path(work, "built"), target)
        except OSError:
            if not target.is_dir():  # else another process has compiled it
                raise


def _say_not_compiled(why: str) -> int:
    """Print the reason and return the exit code."""
    print(f"cannot compile the control path, which runs in Python: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
