"""Understands: where did the time of a run go? Its folder, its ledger, reports, explanations, traces, notebooks."""
