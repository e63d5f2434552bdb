"""State that the program's code keeps, switches and draws while it trains, outside of the model's variables."""
