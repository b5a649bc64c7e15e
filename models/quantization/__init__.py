"""Quantized checkpoints: their config, their tensor packing, and the formats that a rank holds."""
