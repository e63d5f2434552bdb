"""Optional, faster implementations of parts of a step: one module each, measured, and switchable by name.

Each computes the same numbers (to rounding) as what it replaces, refuses whatever it cannot prove to be the same, and
has a test that compares the two. `PHALANX_ACCELERATIONS` selects which are in use; see `registry`.
"""
