"""How does a run read in Python? Run folders as tables of numpy arrays, frames and figures."""
