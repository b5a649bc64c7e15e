"""Pipelines: the protocol that the coordinator uses, and its in-process and multi-rank implementations."""
