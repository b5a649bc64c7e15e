"""What carries most: the capacity of a setting under an SLO, and the search for the setting with the most of it."""
