"""The elements of a dataset: their parts, and their leaves as NumPy arrays."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from phalanx.arrays.tree import leaves
from phalanx.errors import UnsupportedError

Array = np.ndarray[Any, Any]

MOST_PARTS = 3


class ElementStructure(enum.Enum):
    """The structure of a dataset's elements. A custom `train_step` receives them in this structure."""

    PARTS = "x, (x, y) or (x, y, sample_weight)"
    ALONE = "(x,)"
    TWO_ITEMS = "(x, None)"
    THREE_ITEMS = "(x, y, None), (x, None, None) or (x, None, sample_weight)"
    WHOLE = "a tuple of more than three items, which only a custom train_step can read"


def unpack(element: Any) -> tuple[ElementStructure, tuple[Any, Any, Any]]:
    """Return the structure of a dataset's element, and its `(x, y, sample_weight)` like
    `keras.utils.unpack_x_y_sample_weight`. An element of structure WHOLE becomes x."""
    if isinstance(element, list):
        element = tuple(element)
    if not isinstance(element, tuple):
        return ElementStructure.PARTS, (element, None, None)
    if len(element) > MOST_PARTS:
        return ElementStructure.WHOLE, (element, None, None)
    x, y, sample_weight = (*element, None, None)[:MOST_PARTS]
    return _structure_of(element), (x, y, sample_weight)


def _structure_of(element: tuple[Any, ...]) -> ElementStructure:
    """The structure of a tuple of one, two or three items. PARTS is the result of Keras's own packing, which omits
    absent parts and wraps a list of inputs in a tuple."""
    if len(element) == 1:
        return ElementStructure.PARTS if isinstance(element[0], tuple | list) else ElementStructure.ALONE
    if all(item is not None for item in element):
        return ElementStructure.PARTS
    return ElementStructure.TWO_ITEMS if len(element) == 2 else ElementStructure.THREE_ITEMS


def to_numpy(leaf: Any) -> Any:
    """Convert a tensor of any backend (or a pandas or SciPy object) to a NumPy array, without a copy if possible.

    Sparse tensors become dense, as do ragged tensors whose rows have equal lengths. The array may share the tensor's
    memory.

    Raises: UnsupportedError for a ragged tensor with rows of different lengths.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    if hasattr(leaf, "detach"):  # torch: tensors that require a gradient or are on a device
        return _from_torch(leaf.detach().cpu())
    if hasattr(leaf, "toarray"):  # scipy.sparse
        return leaf.toarray()
    if hasattr(leaf, "todense"):  # jax.experimental.sparse
        return np.asarray(leaf.todense())
    kind = type(leaf)
    if kind.__module__.startswith("tensorflow."):
        if kind.__name__ == "RaggedTensor":
            leaf = _of_equal_rows(leaf)
        elif kind.__name__ == "SparseTensor":
            import tensorflow as tf

            leaf = tf.sparse.to_dense(leaf)
    return np.asarray(leaf)


def _from_torch(tensor: Any) -> Any:
    if str(tensor.dtype) != "torch.bfloat16":
        return tensor.numpy()
    import ml_dtypes

    # PyTorch cannot pass bfloat16 to NumPy. float32 has all of its values.
    return tensor.float().numpy().astype(ml_dtypes.bfloat16)


def _of_equal_rows(ragged: Any) -> Any:
    values, dense = ragged.flat_values, ragged.to_tensor()
    if np.prod(dense.shape) != np.prod(values.shape):
        raise UnsupportedError(
            "A ragged tensor has rows of several lengths, but a strategy divides dense arrays, and a model would take "
            "padding for data. Pad it yourself, `dataset.map(lambda x, y: (x.to_tensor(), y))`, and "
            "mask it in the model (`keras.layers.Masking`, `Embedding(mask_zero=True)`)."
        )
    return dense


def describe(structure: Any) -> str:
    """Shapes (without the first dimension) and dtypes, for messages: `(28, 28) uint8, () int64`."""
    return ", ".join(f"{tuple(leaf.shape[1:])} {leaf.dtype}" for leaf in leaves(structure))
