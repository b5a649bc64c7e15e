"""The config of a run: hydra groups in YAML beside this file, and their schema as plain frozen dataclasses."""
