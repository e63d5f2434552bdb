"""Keras models on TensorFlow."""
