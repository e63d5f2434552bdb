"""Makes a replica's step one of the global batch: its losses, means, gradients and normalization."""
