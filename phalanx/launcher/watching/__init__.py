"""What others see of a job, and how they reach it: `phalanx status`, `phalanx top`, the dashboard."""
