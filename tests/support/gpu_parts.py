"""Parts of `benchmarks/gpu` that end in every way in which a part can end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from benchmarks.gpu.parts import Task
from benchmarks.gpu.rows import Row


def works(task: Task) -> Iterator[Row]:
    yield Row(part="works", quantity="process", value=os.getpid())


def fails(task: Task) -> Iterator[Row]:
    yield Row(part="fails", quantity="before it failed", value=1.0)
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more lines")


def hangs(task: Task) -> Iterator[Row]:
    yield Row(part="hangs", quantity="before it hung", value=1.0)
    time.sleep(600)


def dies(task: Task) -> Iterator[Row]:
    yield Row(part="dies", quantity="before it died", value=1.0)
    os._exit(7)
