"""What accelerators can do, and the names of their topologies.

Sources: Google's specifications, https://cloud.google.com/tpu/docs/v5e, v5p and v6e. They give the interconnect of
a chip, all ports together; a collective along one axis of the torus uses one port in each direction.
"""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass

from phalanx.errors import ConfigurationError, UnsupportedError

CPU = "cpu"
MAX_DEVICES = 4096
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device of a topology.

    Attributes:
        flops: of bf16 products in a second, as TPUs compute products of float32 too, unless told otherwise.
        memory_bytes: of a device.
        memory_bytes_per_s: of this memory.
        port_bytes_per_s: of one port of the interconnect, one way.
        dimensions: of its torus.
        example: of a topology.
        type_name: of the machine type, before the number of chips or cores.
        cores_counted: by how much that number is more than that of devices.
    """

    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    port_bytes_per_s: float
    dimensions: int
    example: str
    type_name: str
    cores_counted: int = 1


ACCELERATORS = {
    "v5e": Accelerator(197e12, 16 * GIB, 819e9, 50e9, 2, "v5e:2x4", "v5litepod"),
    "v5p": Accelerator(459e12, 95 * GIB, 2765e9, 100e9, 3, "v5p:2x2x2", "v5p", cores_counted=2),
    "v6e": Accelerator(918e12, 32 * GIB, 1640e9, 100e9, 2, "v6e:4x4", "v6e"),
}

_KNOWN = ", ".join([*(each.example for each in ACCELERATORS.values()), "cpu:4"])


@dataclass(frozen=True, slots=True)
class DeviceTopology:
    """Devices that are not there.

    Attributes:
        name: as JAX takes it.
        devices: their number.
        accelerator: of this kind; None for parts of a CPU.
    """

    name: str
    devices: int
    accelerator: Accelerator | None

    @property
    def tpu_variables(self) -> dict[str, str]:
        """What `libtpu` reads instead of asking a TPU host's metadata; none for a CPU."""
        if self.accelerator is None:
            return {}
        chips = self.devices * self.accelerator.cores_counted
        return {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": f"{self.accelerator.type_name}-{chips}",
            "TPU_WORKER_HOSTNAMES": "localhost",
        }


def parse_topology(text: str) -> DeviceTopology:
    """The topology of this name, such as `v5e:2x4` or `cpu:4`.

    Raises: ConfigurationError naming those that are known.
    """
    kind, _, shape = text.strip().lower().partition(":")
    accelerator = ACCELERATORS.get(kind)
    if accelerator is None and kind != CPU:
        raise ConfigurationError(f"{text!r} is no topology that phalanx plan knows. Write one such as {_KNOWN}.")
    dimensions = 1 if accelerator is None else accelerator.dimensions
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else []
    if len(sizes) != dimensions or math.prod(sizes) > MAX_DEVICES:
        example = "cpu:4" if accelerator is None else accelerator.example
        raise ConfigurationError(
            f"{text!r}: the devices of {kind} are arranged in {dimensions} dimension{'s' * (dimensions > 1)}. Write a "
            f"topology such as {example}, with {MAX_DEVICES:,} devices at most."
        )
    return DeviceTopology(f"{kind}:{shape}", math.prod(sizes), accelerator)


def check_compiler(topology: DeviceTopology, backend: str | None) -> None:
    """Check that a step can be compiled for a topology here.

    Args:
        topology: the devices.
        backend: of Keras, if the user has chosen one.

    Raises:
        UnsupportedError: Keras is to run on another backend than JAX.
        ConfigurationError: the compiler for TPUs is not installed.
    """
    if backend not in (None, "", "jax"):
        raise UnsupportedError(
            f"A step is compiled for many devices on JAX alone, and Keras is to run on {backend!r}. Set "
            f"KERAS_BACKEND=jax, or plan for replicas: --machines 64 --link 10Gbit."
        )
    if topology.accelerator is not None and importlib.util.find_spec("libtpu") is None:
        raise ConfigurationError(
            f'{topology.name} needs the compiler for TPUs, which is not installed: pip install "phalanx[tpu]". It '
            f"needs no TPU. With it installed, set JAX_PLATFORMS=cpu for programs that do not look for one."
        )
