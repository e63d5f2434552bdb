"""Predicts step time, traffic and memory of a job on machines that are not available. Pure except for measurements."""
