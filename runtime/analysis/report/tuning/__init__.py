"""Results of a search for the highest request rate: tables for the terminal, charts and the page."""
