"""What Keras's callbacks and Keras's saving write, and where."""
