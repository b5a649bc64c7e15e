"""Traces that other engines recorded, as a `RunRecord`: what each importer makes, and how ranks become one run."""
