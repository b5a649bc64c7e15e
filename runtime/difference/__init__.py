"""What two runs differ in: its numbers, words, terminal tables and page."""
