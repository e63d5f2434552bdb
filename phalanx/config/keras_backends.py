"""The backends of Keras that Phalanx trains on."""

BACKENDS = ("jax", "tensorflow", "torch")
