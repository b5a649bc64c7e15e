"""`python -m gapless` is the command `gapless`."""

import sys

from gapless.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
