"""Starts runs: command line, Ray, torchrun, HTTP server."""
