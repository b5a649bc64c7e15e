"""Helpers of the commands: files that they read and write, a least-squares fit, and processes of a peer simulator."""
