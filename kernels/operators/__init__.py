"""Elementwise and norm operators of a decoder layer: torch on any device, C++ on a CPU, Triton on CUDA."""
