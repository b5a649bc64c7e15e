"""Profiles a stage's operators on this machine, and reports the errors of their interpolation."""
