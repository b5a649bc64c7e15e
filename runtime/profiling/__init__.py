"""Measures how long a stage's operators take on this machine: which micro-batches, on which ranks, with which error."""
