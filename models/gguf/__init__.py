"""Reads models in GGUF, llama.cpp's format: architecture, weights and tokenizer from one file."""
