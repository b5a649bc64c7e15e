"""Helpers of the benchmarks: input and output files, a least-squares fit, servers, and processes of peers."""
