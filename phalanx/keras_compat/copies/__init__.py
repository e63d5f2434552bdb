"""Copies of models and objects in other processes, which do not run the program that creates them."""
