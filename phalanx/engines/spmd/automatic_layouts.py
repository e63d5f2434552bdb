"""Layouts for model parallelism, derived only from the paths and shapes of variables.

A layer that widens divides its output, and the next one, which narrows, divides its input, so that they need one sum
between them. Attention is divided by heads, an embedding by its rows.
Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations


def automatic_layout(
    path: str, shape: tuple[int, ...], axis_name: str, devices: int, min_size: int
) -> tuple[str | None, ...]:
    """Return the layout of a variable.

    Args:
        path: Path of the variable, such as "attention/query/kernel".
        shape: Shape of the variable.
        axis_name: The mesh axis over which the model is divided.
        devices: Number of devices along this axis.
        min_size: Variables with fewer values stay whole.
    """
    whole: tuple[str | None, ...] = (None,) * len(shape)
    size = 1
    for length in shape:
        size *= length
    if size < min_size:
        return whole
    for axis in _preferred(path.split("/"), shape):
        if shape[axis] % devices == 0:
            return (*whole[:axis], axis_name, *whole[axis + 1 :])
    return whole


def _preferred(path: list[str], shape: tuple[int, ...]) -> list[int]:
    """Return the axes of a variable, the best to divide first."""
    owner, name = (path[-2] if len(path) > 1 else ""), path[-1]
    longest_first = sorted(range(len(shape)), key=lambda axis: (-shape[axis], -axis))
    if name == "embeddings":
        return [0, *longest_first]
    if len(shape) == 3 and owner in ("query", "key", "value"):
        return [1, *longest_first]  # (width, heads, width of a head)
    if len(shape) == 3 and owner == "attention_output":
        return [0, *longest_first]  # (heads, width of a head, width)
    if len(shape) >= 3:
        return [len(shape) - 1, *longest_first]  # filters of a convolution
    return longest_first
