"""Accelerators: how many there are, which process uses which, and how their memory is taken."""
