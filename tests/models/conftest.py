"""Makes `stage_driver`, which rank processes run as a script, importable from the tests beside it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
