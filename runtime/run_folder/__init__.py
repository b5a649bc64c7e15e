"""Writes and reads run folders: data only, it renders nothing."""
