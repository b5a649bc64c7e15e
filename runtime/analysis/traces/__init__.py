"""Imports traces from other engines as a `RunRecord`: reads the ranks' files, and merges them into a run."""
