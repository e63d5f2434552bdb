"""What one training step does, and when replicas synchronize: one module for each kind of step."""
