"""The folder that a run leaves, written and read: data only, nothing is rendered here."""
