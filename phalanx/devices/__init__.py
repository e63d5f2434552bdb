"""Accelerators: their number, their assignment to processes, and how processes allocate their memory."""
