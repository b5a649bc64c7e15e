"""Monitoring of a server: live page, recordings, idle time by cause. Needs `runtime/analysis`."""
