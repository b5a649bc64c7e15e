"""Reports of runs: pages that open offline, figures, and tables for the terminal."""
