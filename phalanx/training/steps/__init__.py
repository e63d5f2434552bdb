"""Training steps, and when replicas synchronize: one module for each kind of step."""
