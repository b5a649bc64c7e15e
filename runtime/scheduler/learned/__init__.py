"""What policies learn from the spans of a run: stage times, saturation, chunk size, depth."""
