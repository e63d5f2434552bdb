"""The most used functions of TensorFlow 1's `tf.layers`; TensorFlow with Keras 3 has none of them.

Variables have the same names, shapes and initial distributions as in the originals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from phalanx.errors import UnsupportedError

v1 = tf.compat.v1
ZEROS, ONES = tf.zeros_initializer(), tf.ones_initializer()
Activation = Callable[[Any], Any] | None

__all__ = ["average_pooling2d", "batch_normalization", "conv2d", "dense", "dropout", "flatten", "max_pooling2d"]


def dense(
    inputs: Any,
    units: int,
    activation: Activation = None,
    use_bias: bool = True,
    kernel_initializer: Any = None,
    bias_initializer: Any = ZEROS,
    kernel_regularizer: Any = None,
    bias_regularizer: Any = None,
    activity_regularizer: Any = None,
    kernel_constraint: Any = None,
    bias_constraint: Any = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
) -> Any:
    """Compute `activation(inputs @ kernel + bias)` over the last axis. Takes the arguments of `tf.layers.dense`."""
    inputs = tf.convert_to_tensor(inputs)
    with v1.variable_scope(name, "dense", [inputs], reuse=reuse):
        shape = [int(inputs.shape[-1]), units]
        kernel = v1.get_variable(
            *("kernel", shape, inputs.dtype, kernel_initializer, kernel_regularizer),
            trainable=trainable,
            constraint=kernel_constraint,
        )
        outputs = tf.tensordot(inputs, kernel, 1)
        if use_bias:
            bias = v1.get_variable(
                *("bias", [units], inputs.dtype, bias_initializer, bias_regularizer),
                trainable=trainable,
                constraint=bias_constraint,
            )
            outputs = tf.nn.bias_add(outputs, bias)
        return _apply_activation(outputs, activation, activity_regularizer)


def conv2d(
    inputs: Any,
    filters: int,
    kernel_size: int | Sequence[int],
    strides: int | Sequence[int] = (1, 1),
    padding: str = "valid",
    data_format: str = "channels_last",
    dilation_rate: int | Sequence[int] = (1, 1),
    activation: Activation = None,
    use_bias: bool = True,
    kernel_initializer: Any = None,
    bias_initializer: Any = ZEROS,
    kernel_regularizer: Any = None,
    bias_regularizer: Any = None,
    activity_regularizer: Any = None,
    kernel_constraint: Any = None,
    bias_constraint: Any = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
) -> Any:
    """Convolve images. Takes the arguments of `tf.layers.conv2d`."""
    inputs = tf.convert_to_tensor(inputs)
    layout = _layout(data_format)
    with v1.variable_scope(name, "conv2d", [inputs], reuse=reuse):
        shape = [*_pair(kernel_size), int(inputs.shape[layout.index("C")]), filters]
        kernel = v1.get_variable(
            *("kernel", shape, inputs.dtype, kernel_initializer, kernel_regularizer),
            trainable=trainable,
            constraint=kernel_constraint,
        )
        outputs = tf.nn.conv2d(inputs, kernel, _pair(strides), padding.upper(), layout, _pair(dilation_rate))
        if use_bias:
            bias = v1.get_variable(
                *("bias", [filters], inputs.dtype, bias_initializer, bias_regularizer),
                trainable=trainable,
                constraint=bias_constraint,
            )
            outputs = tf.nn.bias_add(outputs, bias, data_format=layout)
        return _apply_activation(outputs, activation, activity_regularizer)


def max_pooling2d(
    inputs: Any,
    pool_size: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str = "valid",
    data_format: str = "channels_last",
    name: str | None = None,
) -> Any:
    """Return the maximum of each window of an image. Takes the arguments of `tf.layers.max_pooling2d`."""
    layout = _layout(data_format)
    return tf.nn.max_pool2d(inputs, _pair(pool_size), _pair(strides), padding.upper(), layout, name)


def average_pooling2d(
    inputs: Any,
    pool_size: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str = "valid",
    data_format: str = "channels_last",
    name: str | None = None,
) -> Any:
    """Return the mean of each window of an image. Takes the arguments of `tf.layers.average_pooling2d`."""
    layout = _layout(data_format)
    return tf.nn.avg_pool2d(inputs, _pair(pool_size), _pair(strides), padding.upper(), layout, name)


def flatten(inputs: Any, name: str | None = None, data_format: str = "channels_last") -> Any:
    """Flatten each sample to one vector. Takes the arguments of `tf.layers.flatten`."""
    inputs = tf.convert_to_tensor(inputs)
    if _layout(data_format) == "NCHW" and inputs.shape.rank is not None and inputs.shape.rank > 2:
        inputs = tf.transpose(inputs, [0, *range(2, inputs.shape.rank), 1])
    size = inputs.shape[1:].num_elements()
    return tf.reshape(inputs, [-1, size] if size is not None else [tf.shape(inputs)[0], -1], name)


def dropout(
    inputs: Any,
    rate: float = 0.5,
    noise_shape: Any = None,
    seed: int | None = None,
    training: Any = False,
    name: str | None = None,
) -> Any:
    """Set a fraction `rate` of the inputs to zero if `training` is true. Takes the arguments of `tf.layers.dropout`."""
    inputs = tf.convert_to_tensor(inputs)

    def drop() -> Any:
        return tf.nn.dropout(inputs, rate, noise_shape, seed, name)

    return _select_by_training(training, drop, lambda: tf.identity(inputs))


def batch_normalization(
    inputs: Any,
    axis: int = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    beta_initializer: Any = ZEROS,
    gamma_initializer: Any = ONES,
    moving_mean_initializer: Any = ZEROS,
    moving_variance_initializer: Any = ONES,
    beta_regularizer: Any = None,
    gamma_regularizer: Any = None,
    beta_constraint: Any = None,
    gamma_constraint: Any = None,
    training: Any = False,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
    renorm: bool = False,
    renorm_clipping: Any = None,
    renorm_momentum: float = 0.99,
    fused: bool | None = None,
    virtual_batch_size: int | None = None,
    adjustment: Any = None,
) -> Any:
    """Apply batch normalization. Takes the arguments of `tf.layers.batch_normalization`.

    As in the original, the updates of the moving averages are in the collection `tf.GraphKeys.UPDATE_OPS`: run them
    with the training operation. Also as there, the moving variance for images is the unbiased estimate for the
    population from which the batch is sampled, unless `fused` is False.

    Raises: UnsupportedError: renorm, virtual_batch_size or adjustment.
    """
    if renorm or virtual_batch_size is not None or adjustment is not None:
        raise UnsupportedError("tf.layers.batch_normalization has no renorm, virtual_batch_size and adjustment here.")
    inputs = tf.convert_to_tensor(inputs)
    axis %= inputs.shape.rank
    with v1.variable_scope(name, "batch_normalization", [inputs], reuse=reuse):
        make = functools.partial(_channel_variable, inputs, axis)
        gamma = make("gamma", gamma_initializer, trainable, gamma_regularizer, gamma_constraint) if scale else None
        beta = make("beta", beta_initializer, trainable, beta_regularizer, beta_constraint) if center else None
        mean = make("moving_mean", moving_mean_initializer, False)
        variance = make("moving_variance", moving_variance_initializer, False)
        is_fused = fused is not False and inputs.shape.rank == 4 and axis in (1, 3)
        used = _moments(inputs, axis, (mean, variance), training, 1.0 - momentum, is_sample=is_fused)
        wide = [1] * axis + [-1] + [1] * (inputs.shape.rank - axis - 1)
        parts = [None if each is None else tf.reshape(each, wide) for each in (*used, beta, gamma)]
        return tf.nn.batch_normalization(inputs, *parts, epsilon)


def _channel_variable(
    inputs: Any, axis: int, name: str, initializer: Any, trainable: bool, regularizer: Any = None, limit: Any = None
) -> Any:
    """Create a variable with one value per channel."""
    shape = [int(inputs.shape[axis])]
    return v1.get_variable(name, shape, inputs.dtype, initializer, regularizer, trainable=trainable, constraint=limit)


def _moments(
    inputs: Any, axis: int, moving: Sequence[Any], training: Any, rate: float, *, is_sample: bool
) -> Sequence[Any]:
    """Return mean and variance of the batch in training, else the moving ones, and add their updates to the graph.

    Args:
        inputs: The batch.
        axis: Axis of its channels.
        moving: Moving mean and variance.
        training: Whether this is training.
        rate: The batch's share of the moving averages.
        is_sample: Whether the moving variance is the unbiased estimate for the population of the batch.
    """
    mean, variance = tf.nn.moments(inputs, [each for each in range(inputs.shape.rank) if each != axis])
    used: Sequence[Any] = _select_by_training(
        training, lambda: [mean, variance], lambda: [tf.identity(each) for each in moving]
    )
    if is_sample:
        count = tf.cast(tf.size(inputs) // inputs.shape[axis], inputs.dtype)
        variance *= count / tf.maximum(count - 1, 1)
    # Outside of training, the updates change nothing: the contents of the collection cannot depend on a tensor.
    share = tf.cast(tf.where(training, rate, 0.0), inputs.dtype)
    for average, batch in zip(moving, (mean, variance), strict=True):
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, average.assign_sub((average - batch) * share))
    return used


def _apply_activation(outputs: Any, activation: Activation, regularizer: Any) -> Any:
    result = outputs if activation is None else activation(outputs)
    if regularizer is not None:
        penalty = regularizer(result)
        batch_size = tf.cast(tf.shape(result)[0], penalty.dtype)  # as in TensorFlow, the mean over the samples
        v1.add_to_collection(v1.GraphKeys.REGULARIZATION_LOSSES, penalty / batch_size)
    return result


def _select_by_training(training: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return one of two results; decided when the graph runs if `training` is a tensor."""
    if tf.is_tensor(training):
        return v1.cond(tf.cast(training, tf.bool), then, otherwise)
    return then() if training else otherwise()


def _layout(data_format: str) -> str:
    return {"channels_last": "NHWC", "channels_first": "NCHW"}[data_format]


def _pair(size: int | Sequence[int]) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)
