"""Training with parameter servers: what the chief and the workers do in `fit`."""
