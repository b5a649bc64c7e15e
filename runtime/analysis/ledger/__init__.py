"""The bubble ledger: attributes every idle second of every stage to exactly one cause, and totals a run."""
