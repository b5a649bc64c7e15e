"""Helpers of the commands: files that they read and write, a least-squares fit, servers, and processes of peers."""
