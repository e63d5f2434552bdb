"""Assigns one GPU to each worker. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from phalanx.config.environment_variables import HOST_GPUS, VISIBLE_GPUS
from phalanx.devices.gpu_count import HIDE_GPUS, ON_DEMAND_ALLOCATION
from phalanx.errors import ConfigurationError

_TASK = r"(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?"
_DEVICE = re.compile(_TASK + r"(?:/?(?:physical_)?device:|/)?(cpu|gpu|cuda)(?::(\d+))?", re.IGNORECASE)


def device_variables(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that restrict a process to one device.

    Args:
        device: `cpu:0`, `gpu:1`, `/gpu:1`, `/device:GPU:1` or `cuda:1`.
        environ: The current environment. Device numbers are indices into CUDA_VISIBLE_DEVICES, if that is set.

    Raises: ConfigurationError if the name is malformed or the GPU does not exist.
    """
    kind, index = _parse(device)
    if kind == "cpu":
        return dict(HIDE_GPUS)
    visible = environ.get(VISIBLE_GPUS)
    if visible is None:
        return {VISIBLE_GPUS: str(index)}
    names = [name for name in visible.split(",") if name.strip()]
    if index >= len(names):
        raise ConfigurationError(
            f"{device!r} does not exist: CUDA_VISIBLE_DEVICES={visible} has {len(names)} GPU(s), numbered from 0."
        )
    return {VISIBLE_GPUS: names[index]}


def check_devices(devices: Sequence[str], gpus: int | None = None) -> None:
    """Raise ConfigurationError for malformed names, repeated GPUs, and GPUs that do not exist.

    Args:
        devices: Names as in `device_variables`.
        gpus: Number of GPUs; None if unknown.
    """
    parsed = [_parse(device) for device in devices]
    for place, (device, (kind, index)) in enumerate(zip(devices, parsed, strict=True)):
        if kind == "gpu" and (kind, index) in parsed[:place]:
            raise ConfigurationError(f"{device!r} is listed twice; each replica needs its own GPU.")
        if kind == "gpu" and gpus is not None and index >= gpus:
            raise ConfigurationError(f"{device!r} does not exist: this host has {gpus} GPU(s), numbered from 0.")


def keras_device(device: str) -> str:
    """The name for `keras.device`.

    >>> keras_device("/device:GPU:1")
    'gpu:1'
    """
    kind, index = _parse(device)
    # Keras on PyTorch treats `cpu:0` as a different device from that of its tensors, and copies them.
    return kind if (kind, index) == ("cpu", 0) else f"{kind}:{index}"


def same_device(one: str, other: str) -> bool:
    """Whether two names denote the same device; all CPUs count as one."""
    first, second = _parse(one), _parse(other)
    return first[0] == second[0] and (first[0] == "cpu" or first[1] == second[1])


def _parse(device: str) -> tuple[str, int]:
    """The kind, `cpu` or `gpu`, and the number."""
    match = _DEVICE.fullmatch(device.strip()) if isinstance(device, str) else None
    if match is None:
        raise ConfigurationError(f"{device!r} is not a device. Write cpu:0, gpu:1 or /gpu:1.")
    return "cpu" if match[1].lower() == "cpu" else "gpu", int(match[2] or 0)


def worker_gpu_variables(workers: int, gpus: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables that give each local worker one GPU, round-robin if there are fewer GPUs than workers.

    Workers that share a GPU allocate its memory on demand, unless `environ` decides otherwise.

    Args:
        workers: Number of local workers.
        gpus: Number of GPUs that this host's processes may use.
        environ: The current environment, where CUDA_VISIBLE_DEVICES names the GPUs.
    """
    if not gpus:
        return [{} for _ in range(workers)]
    common = {HOST_GPUS: environ.get(VISIBLE_GPUS) or ",".join(map(str, range(gpus)))}
    if workers > gpus:
        common |= {name: environ.get(name, value) for name, value in ON_DEMAND_ALLOCATION.items()}
    return [common | device_variables(f"gpu:{rank % gpus}", environ) for rank in range(workers)]
