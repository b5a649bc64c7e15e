"""Distributed execution: the rank mesh, process groups, Megatron layers, stage-to-stage transport, placement."""
