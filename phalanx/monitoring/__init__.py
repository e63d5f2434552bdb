"""What users see of a job: the console, the failure report, the timeline, TensorBoard event files."""
