"""Simulation: the cost model, workloads, the simulated pipeline, profiling and tuning."""
