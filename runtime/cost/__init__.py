"""Predicts how long a stage takes for a micro-batch: the sum of operator times, from a profile or analytic."""
