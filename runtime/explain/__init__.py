"""What a run would be under another setting: its twin, replayed on the simulated pipeline."""
