"""Finds the fastest collective algorithm by measuring."""
