"""Pipelines: the protocol that the coordinator knows, and its implementations in process and over ranks."""
