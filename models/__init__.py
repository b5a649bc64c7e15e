"""What a stage computes: decoder layers, attention, KV cache, weights, sampling, tokenizer."""
