"""The server that publishes recipes and keeps the log (`app` and `server`: extra `server`)."""
