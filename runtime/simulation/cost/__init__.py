"""Predicts a stage's time for a micro-batch as the sum of operator times, from a profile or analytic."""
