"""Measures one GPU: whether results are right, the paper's figures, a profile, and speed beside the device's floor."""
