"""Engines whose replicas are processes: one package per Keras backend."""
