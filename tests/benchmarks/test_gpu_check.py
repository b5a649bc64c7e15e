"""The GPU check imports from a bare checkout, and says in one line that there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it runs for minutes")
def test_without_a_gpu_and_without_an_installed_gapless() -> None:
    hide = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
        "sys.path = [p for p in sys.path if 'editable' not in p and 'site-packages/gapless' not in p]; "
    )
    run = "import runpy; runpy.run_module('benchmarks.gpu_check', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", hide + run], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "gpu_check: no CUDA device here; nothing to check\n"), done.stderr
