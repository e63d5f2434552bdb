"""What only a machine with a GPU can show; `make gpu-check` runs these and the scenarios of `tests/training` there."""
