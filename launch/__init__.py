"""The start of a run: command line, Ray, torchrun."""
