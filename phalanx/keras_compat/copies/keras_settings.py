"""The settings of `keras.config`, which layers, losses and metrics read when they are created and when they compute.

Tested with Keras 3.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras


class KerasSettings(NamedTuple):
    """The settings of `keras.config` at some time.

    Attributes:
        dtype_policy: Configuration of the dtype policy.
    """

    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: Any
    has_flash_attention: bool | None
    max_epochs: int | None
    max_steps_per_epoch: int | None


def keras_settings() -> KerasSettings:
    """Return the settings of this process."""
    return KerasSettings(
        keras.config.floatx(),
        keras.config.epsilon(),
        keras.config.image_data_format(),
        keras.dtype_policies.serialize(keras.config.dtype_policy()),
        keras.config.is_flash_attention_enabled(),
        keras.config.max_epochs(),
        keras.config.max_steps_per_epoch(),
    )


def set_keras_settings(settings: KerasSettings) -> None:
    """Set the settings of this process."""
    keras.config.set_floatx(settings.floatx)
    keras.config.set_epsilon(settings.epsilon)
    keras.config.set_image_data_format(settings.image_data_format)
    keras.config.set_dtype_policy(keras.dtype_policies.deserialize(settings.dtype_policy))
    wanted = settings.has_flash_attention
    if wanted is not None and wanted != keras.config.is_flash_attention_enabled():
        toggle = keras.config.enable_flash_attention if wanted else keras.config.disable_flash_attention
        toggle()
    keras.config.set_max_epochs(settings.max_epochs)
    keras.config.set_max_steps_per_epoch(settings.max_steps_per_epoch)


@contextmanager
def with_keras_settings(settings: KerasSettings) -> Iterator[None]:
    """Context with other settings, such as those with which a layer was constructed."""
    before = keras_settings()
    set_keras_settings(settings)
    try:
        yield
    finally:
        set_keras_settings(before)
