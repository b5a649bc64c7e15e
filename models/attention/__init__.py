"""Computes attention over the paged KV cache, through SDPA on any device or through xformers on CUDA."""
