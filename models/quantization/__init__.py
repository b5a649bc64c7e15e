"""Quantized checkpoints: what their config says, how their tensors are packed, and what a stage holds of them."""
