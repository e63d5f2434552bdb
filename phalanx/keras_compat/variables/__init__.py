"""Keras's variables: merged over replicas, laid out on meshes, and which belong to which."""
