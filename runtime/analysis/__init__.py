"""Analysis of where a run's time went: run folders, the bubble ledger, reports, explanations, traces, notebooks."""
