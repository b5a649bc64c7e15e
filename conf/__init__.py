"""The config of a run: its schema as plain frozen dataclasses, and hydra config groups in YAML."""
