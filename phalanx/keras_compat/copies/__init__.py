"""Models and objects in other processes, where no program makes them."""
