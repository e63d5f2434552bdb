"""What a job would take on machines that are not there: time of a step, traffic, memory. Pure, but for measurements."""
