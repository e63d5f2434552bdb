"""What is found out about a program before its first step, and what is refused."""
