"""Where Horovod keeps what all frameworks share, for programs that import it from there."""
