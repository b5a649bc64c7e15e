"""An ongoing server run: its ledger, the data for the live page, and recorded windows."""
