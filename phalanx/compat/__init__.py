"""Compatibility with programs written for other libraries."""
