"""Servers that store the variables of a model, and the workers that train it with them."""
