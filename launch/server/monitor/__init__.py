"""What a server shows of its run: the live page, recordings, idle time. It needs `runtime/analysis`."""
