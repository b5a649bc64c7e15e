"""Reports of runs: self-contained pages, figures, and tables for the terminal."""
