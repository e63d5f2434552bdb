"""Faster implementations of parts of a step that are optional: each one module, measured, and switchable by name.

Each computes the same numbers (to rounding) as what it replaces, refuses whatever it cannot prove to be the same, and
has a test that compares the two. `PHALANX_ACCELERATIONS` chooses which are in use; see `registry`.
"""
