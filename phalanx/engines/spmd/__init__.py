"""One compiled program over many devices, on JAX: engine, placement of the model on a mesh, steps."""
