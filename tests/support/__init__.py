"""Helpers that several tests share: pipelines on a virtual clock, records made by hand, models, processes."""
