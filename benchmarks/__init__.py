"""Benchmarks: commands to run from the repository's root, with gapless installed or not."""

import importlib.util
import sys
import types
from pathlib import Path

if importlib.util.find_spec("gapless") is None:
    _package = types.ModuleType("gapless")
    _package.__path__ = [str(Path(__file__).parent.parent)]
    sys.modules["gapless"] = _package
