"""Sends the logs of the chief's validation to the other workers, for their callbacks and history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from phalanx.keras_compat.variables.host_values import to_host
from phalanx.parameter_server.server_messages import EpochOver, FitOver, RequestValidationLogs, ValidationLogs
from phalanx.training.steps.parameter_server_step import ParameterServerMerge
from phalanx.transport import serialization

Array = np.ndarray[Any, Any]


def message(
    merge: ParameterServerMerge, fit: int, epoch: int, logs: Mapping[str, Any]
) -> tuple[ValidationLogs, list[Array]]:
    """On the chief, the message for the head."""
    arrays = keras.tree.map_structure(lambda value: to_host(value) if keras.ops.is_tensor(value) else value, dict(logs))
    # The result of a custom metric may be anything.
    plain = {name: value for name, value in arrays.items() if serialization.is_serializable(value)}
    encoded = np.frombuffer(serialization.encode(plain), np.uint8)
    return ValidationLogs(fit, epoch, merge.tickets.era), [encoded]


def receive(merge: ParameterServerMerge, fit: int, epoch: int) -> dict[str, Any] | EpochOver | FitOver:
    """On the other workers, the chief's logs; empty if it has not validated. Otherwise the reason why it will not: it
    has gone back to an earlier epoch, or has ended the `fit`.

    Raises: CollectiveTimeoutError or PeerLostError naming the chief.
    """
    received = merge.request_from_chief(RequestValidationLogs(fit, epoch, merge.tickets.era))
    if isinstance(received, EpochOver | FitOver):
        return received
    return dict(serialization.decode(bytes(received[0]))) if received else {}
