"""GPU checks: correct results, the paper's figures, a profile, and speed compared with the device's peak rates."""
