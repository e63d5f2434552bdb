"""The devices that the replicas of this process compute on: its GPUs, or the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.config.environment_variables import JOB_ID
from phalanx.devices.gpu_assignment import check_devices
from phalanx.devices.gpu_count import count_gpus
from phalanx.errors import ConfigurationError


def replica_devices(replicas: int, environment: Mapping[str, str]) -> list[str]:
    """One device for each replica: a GPU, such as "gpu:0", if there are enough; else a part of the CPU."""
    kind = "gpu" if count_gpus(environment) >= replicas else "cpu"
    return [f"{kind}:{index}" for index in range(replicas)]


def resolve_devices(given: int | Sequence[str] | None, strategy: str, environment: Mapping[str, str]) -> list[str]:
    """One device for each replica.

    Args:
        given: Argument that the user passed to the strategy; None for all GPUs, or the CPU.
        strategy: Name of the strategy, for messages.
        environment: The environment of this process.

    Raises: ConfigurationError for devices that do not exist.
    """
    if given is None:
        return replica_devices(max(1, count_gpus(environment)), environment)
    if isinstance(given, bool) or (isinstance(given, int) and given < 1):
        raise ConfigurationError(f"{strategy} needs at least one device; got {given!r}.")
    if isinstance(given, int):
        return replica_devices(given, environment)
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ConfigurationError(
            f"{strategy} was given {given!r} for its devices; it must be a number of replicas or a list such as "
            f"['cpu:0', 'cpu:1']."
        )
    # A replica that was started for one of the devices sees no other.
    check_devices(given, None if JOB_ID in environment else count_gpus(environment))
    return list(given)
