"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# On a shared machine one example may take a hundred times as long as the next.
settings.register_profile("gapless", deadline=None)
settings.load_profile("gapless")
