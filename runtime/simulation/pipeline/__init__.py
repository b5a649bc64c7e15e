"""Pipelines on a virtual clock, alone or as replicas behind a router."""
