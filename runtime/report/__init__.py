"""What people look at after a run: a page that opens offline, and tables for the terminal."""
