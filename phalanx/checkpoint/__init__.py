"""Saving and restoring, with one module for each format."""
