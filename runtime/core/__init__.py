"""Data types shared by all other packages: requests, micro-batches, messages, run records. Needs no torch."""
