"""Tool calling: requests, model formats, grammars and parsing."""
