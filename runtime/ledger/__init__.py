"""The bubble ledger: every idle second of every stage, with exactly one cause, and the totals of a run."""
