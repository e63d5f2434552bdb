"""Keras models on JAX."""
