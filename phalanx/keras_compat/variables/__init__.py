"""Keras's variables: merged over replicas, laid out on meshes, and their relations to each other."""
