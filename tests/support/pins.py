"""The sets of pins at the project's root, and the wheels that an index has of them."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CUDA_OF = {"constraints.txt": 13, "constraints-cuda12.txt": 12}  # the major version of CUDA that each set is for


def pins_of(name: str) -> list[Requirement]:
    """Return the pins of a file of constraints, and of those that it includes."""
    pins: list[Requirement] = []
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("-c "):
            pins += pins_of(line.removeprefix("-c "))
        elif not line.startswith("#"):
            pins.append(Requirement(line))
    return pins


def pinned(pins: list[Requirement], name: str, python: str) -> str:
    """Return the one version of a package that pins give a Python."""
    wanted, environment = canonicalize_name(name), {"python_version": python}
    found = [pin for pin in pins if canonicalize_name(pin.name) == wanted]
    (pin,) = [pin for pin in found if pin.marker is None or pin.marker.evaluate(environment)]
    (only,) = pin.specifier
    assert only.operator == "=="
    return only.version


def wheel_urls(name: str, version: str, python: str) -> list[str]:
    """Return where an index has the wheels of a version for Linux on x86-64, as pip finds them. None: no answer."""
    platform = ("--python-version", python, "--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:")
    command = (sys.executable, "-m", "pip", "index", "versions", name, "-vv", "--retries", "0", "--timeout", "10")
    done = subprocess.run((*command, *platform), capture_output=True, text=True, check=False, timeout=60)
    found = re.compile(rf"Found link (\S+/{name}-{re.escape(version)}-\S+?\.whl)[#\s,]")
    return found.findall(done.stdout + done.stderr)


def files_of_wheel(url: str, ending: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of a wheel's files whose names end so, without a download of all the wheel."""
    with zipfile.ZipFile(_RemoteFile(url)) as wheel:
        for name in wheel.namelist():
            if name.endswith(ending):
                yield name, wheel.read(name).decode()


class _RemoteFile(io.RawIOBase):
    """A file behind a URL, of which only those bytes are fetched that are read."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        self._size = int(self._fetch(0, 0)[1].rpartition("/")[2])

    def _fetch(self, first: int, last: int) -> tuple[bytes, str]:
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            if answer.status != 206:
                raise OSError("the index sends whole files only")
            return answer.read(), answer.headers["Content-Range"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        last = self._size - 1 if size < 0 else min(self._size, self._at + size) - 1
        if last < self._at:
            return b""
        found, _ = self._fetch(self._at, last)
        self._at += len(found)
        return found
