"""What does a stage compute? Decoder stacks, attention, KV cache, weights, sampling, tokenizer."""
