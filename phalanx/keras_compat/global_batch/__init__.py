"""How a step of a replica is one of the global batch: its losses, means, gradients and normalization."""
