"""Options of collectives, with the names and meaning of `tf.distribute`."""

from __future__ import annotations

import enum
import numbers
from dataclasses import dataclass
from typing import Any

from phalanx.config.environment_variables import DEFAULT_TIMEOUT_S
from phalanx.errors import ConfigurationError

MICRO_BATCHES = 24
"""A multiple of 1, 2, 3, 4, 6 and 8, so that each of as many workers gets the same number of micro-batches."""


class CommunicationImplementation(enum.Enum):
    """Which implementation merges values (`tf.distribute.experimental.CommunicationImplementation`).

    AUTO uses shared memory within a host and sockets between hosts. RING uses sockets everywhere. NCCL needs GPUs, and
    this version of Phalanx rejects it.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation
"""Older name, kept by `tf.distribute.experimental`."""


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of collectives (`tf.distribute.experimental.CommunicationOptions`).

    Args:
        bytes_per_pack: Maximum number of bytes that are sent together; 0 for the default, which measured best. Must be
            equal on all ranks.
        timeout_seconds: How long a collective waits for a rank that is connected but does not arrive, before it raises
            `CollectiveTimeoutError`. None for PHALANX_TIMEOUT, or 600 if that is not set.
        implementation: See `CommunicationImplementation`; its name as a string works as well.
        deterministic: Whether training on CPUs gives the same bits with any number of workers: weights, optimizer,
            history, metrics and predictions. Each global batch is cut into the same micro-batches, whichever worker
            computes them, and their contributions are summed in a fixed order. This costs speed: see
            docs/concepts/numbers.md.
        micro_batches: Number of micro-batches per global batch if `deterministic` is set. Fewer are faster; workers
            beyond that number have nothing to compute.

    Example: `CommunicationOptions(bytes_per_pack=1 << 20, timeout_seconds=120.0)`.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    deterministic: bool = False
    micro_batches: int = MICRO_BATCHES

    def __post_init__(self) -> None:
        for name, number in (("bytes_per_pack", self.bytes_per_pack), ("timeout_seconds", self.timeout_seconds)):
            if number is not None and not isinstance(number, numbers.Real):
                raise ConfigurationError(f"{name} is {number!r}; it must be a number.")
        if self.bytes_per_pack < 0 or not float(self.bytes_per_pack).is_integer():
            raise ConfigurationError(
                f"bytes_per_pack is {self.bytes_per_pack}; it must be 0 (chosen automatically) or a number of bytes."
            )
        object.__setattr__(self, "bytes_per_pack", int(self.bytes_per_pack))  # may be 1e6 or a NumPy number
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ConfigurationError(
                f"timeout_seconds is {self.timeout_seconds}; it must be greater than 0, or None for PHALANX_TIMEOUT."
            )
        if not isinstance(self.micro_batches, int) or self.micro_batches < 1:
            raise ConfigurationError(f"micro_batches is {self.micro_batches!r}; it must be a number, at least 1.")
        if self.micro_batches != MICRO_BATCHES and not self.deterministic:
            raise ConfigurationError(
                f"micro_batches={self.micro_batches} has no effect without deterministic=True: set both, or neither."
            )
        named = CommunicationImplementation.__members__.get(str(self.implementation).upper())
        if named is not None:
            object.__setattr__(self, "implementation", named)
        if not isinstance(self.implementation, CommunicationImplementation):
            known = "CommunicationImplementation.AUTO, CommunicationImplementation.RING"
            raise ConfigurationError(f"implementation is {self.implementation!r}; choose one of {known}.")

    @classmethod
    def of(cls, given: Any) -> CommunicationOptions:
        """Convert options of a program: this class, TensorFlow's class of the same name, or None for the default.

        Raises: ConfigurationError for anything else.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        try:
            implementation = CommunicationImplementation(given.implementation.value)
            return cls(given.bytes_per_pack, given.timeout_seconds, implementation)
        except AttributeError:
            raise ConfigurationError(
                f"communication_options is {given!r}. Pass phalanx.CommunicationOptions(...), or leave it out."
            ) from None

    @property
    def timeout_s(self) -> float:
        """`timeout_seconds`, or the default."""
        return DEFAULT_TIMEOUT_S if self.timeout_seconds is None else float(self.timeout_seconds)


CollectiveHints = CommunicationOptions
"""Older name; took `bytes_per_pack` and `timeout_seconds`."""
