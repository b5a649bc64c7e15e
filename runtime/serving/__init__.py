"""The server's engine process, and the messages between it and the HTTP front end."""
