"""Attention over the paged KV cache, behind one small protocol: SDPA anywhere, xformers on CUDA."""
