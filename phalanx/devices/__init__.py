"""Accelerators: their number, their assignment to processes, and the allocation of their memory."""
