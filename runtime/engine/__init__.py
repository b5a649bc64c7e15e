"""The engine: admits requests, keeps the pipeline filled, and returns tokens."""
