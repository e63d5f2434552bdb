"""Keras models on PyTorch."""
