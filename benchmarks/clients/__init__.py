"""The clients of others, driven against `gapless serve`: `make test-clients`."""
