"""What a program does with losses, metrics, variables and random numbers, observed through patches."""
