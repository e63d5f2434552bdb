"""The root cause of a failed job, and the failure report."""
