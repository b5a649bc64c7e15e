"""Third-party clients, driven against `gapless serve`: `make test-clients`."""
