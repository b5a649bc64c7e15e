"""Finds the capacity of a setting under an SLO, and searches for the setting of the highest capacity."""
