"""What Keras's callbacks and its saving write, and where."""
