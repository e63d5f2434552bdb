"""The server side of parameter server training."""
