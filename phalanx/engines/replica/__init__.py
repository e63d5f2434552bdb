"""Engines in which a replica is a process: one package for each Keras backend."""
