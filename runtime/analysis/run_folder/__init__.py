"""Writes and reads the data of run folders; does no rendering."""
