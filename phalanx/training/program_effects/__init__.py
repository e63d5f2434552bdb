"""What the program's own code keeps, switches and draws while it trains, beside the model's variables."""
