"""The engine of a server: a process of its own, and the messages between it and the HTTP front."""
