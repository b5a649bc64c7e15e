"""The data that all other rooms pass around: requests, micro-batches, messages, records of a run. Needs no torch."""
