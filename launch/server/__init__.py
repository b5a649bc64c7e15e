"""The HTTP front of `gapless serve`."""
