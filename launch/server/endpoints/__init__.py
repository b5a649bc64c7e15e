"""The endpoints: a file with the handlers of each group of paths."""
