"""Finds the capacity of a setting under an SLO, and searches for the setting with the highest capacity."""
