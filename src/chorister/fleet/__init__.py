"""A local deployment in one folder, its health check, and simulated devices to go with it."""
