"""Host arrays: trees of arrays, flat buffers, aligned allocation. Independent of backends and processes."""
