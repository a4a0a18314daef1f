"""The server that publishes recipes and keeps the log."""
