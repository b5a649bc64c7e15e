"""Predicts a run under another setting: its twin, replayed on the simulated pipeline."""
