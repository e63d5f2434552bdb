"""Training with parameter servers: the chief's and the workers' side of `fit`."""
