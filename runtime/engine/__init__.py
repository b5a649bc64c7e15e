"""The engine: it admits requests, keeps the pipeline filled, and hands tokens out."""
