"""What is a run? Hydra groups in YAML beside this file, and their schema: plain frozen dataclasses."""
