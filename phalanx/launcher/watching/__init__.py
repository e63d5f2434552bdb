"""Observation and control of a job by other processes: `phalanx status`, `phalanx top`, the dashboard."""
