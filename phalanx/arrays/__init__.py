"""Host arrays: trees of arrays, flat buffers, aligned allocation. Knows no backend and no process."""
