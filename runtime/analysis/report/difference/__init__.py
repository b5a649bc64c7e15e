"""The difference of two runs: its numbers, words, terminal tables and page."""
