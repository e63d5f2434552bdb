"""Performance figures of accelerators, and the names of their topologies.

Sources: Google's specifications, https://cloud.google.com/tpu/docs/v5e, v5p and v6e. They give the total interconnect
bandwidth of all ports of a chip; a collective along one axis of the torus uses one port in each direction. NVIDIA's
data sheets of the A100 (80 GB, SXM), H100 (SXM) and H200; a GPU sends over all of its NVLinks at once.
"""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass

from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.planning.gpu_targets import A100, H100, H200, GpuTarget

CPU = "cpu"
MAX_DEVICES = 4096
GIB = 2**30
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device of a topology.

    Attributes:
        flops: Peak rate of float32 matrix products with default settings: TPUs compute them in bf16, GPUs in TF32.
        memory_bytes: Memory of a device.
        memory_bytes_per_s: Bandwidth of this memory.
        port_bytes_per_s: One-way interconnect bandwidth available to a collective.
        dimensions: Dimensions of the torus; 1 for GPUs, which share one host.
        example: An example topology.
        type_name: Machine type without its number of chips or cores.
        cores_counted: Ratio of that number to the number of devices.
        gpu: XLA's description of the GPU; None for a TPU.
    """

    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    port_bytes_per_s: float
    dimensions: int
    example: str
    type_name: str = ""
    cores_counted: int = 1
    gpu: GpuTarget | None = None


ACCELERATORS = {
    "v5e": Accelerator(197e12, 16 * GIB, 819e9, 50e9, 2, "v5e:2x4", "v5litepod"),
    "v5p": Accelerator(459e12, 95 * GIB, 2765e9, 100e9, 3, "v5p:2x2x2", "v5p", cores_counted=2),
    "v6e": Accelerator(918e12, 32 * GIB, 1640e9, 100e9, 2, "v6e:4x4", "v6e"),
    "a100": Accelerator(156e12, 80e9, 2039e9, 300e9, 1, "a100:8", gpu=A100),
    "h100": Accelerator(494e12, 80e9, 3350e9, 450e9, 1, "h100:8", gpu=H100),
    "h200": Accelerator(494e12, 141e9, 4800e9, 450e9, 1, "h200:8", gpu=H200),
}
MAX_GPUS = 8
"""GPUs per host. Between hosts, they communicate more slowly than over NVLink, depending on the network."""

_KNOWN = ", ".join([*(each.example for each in ACCELERATORS.values()), "cpu:4"])


@dataclass(frozen=True, slots=True)
class DeviceTopology:
    """Devices to compile for. This machine does not need to have them.

    Attributes:
        name: Name that JAX accepts.
        devices: Number of devices.
        accelerator: Kind of the devices; None for CPU devices.
    """

    name: str
    devices: int
    accelerator: Accelerator | None

    @property
    def tpu_variables(self) -> dict[str, str]:
        """Variables that `libtpu` reads instead of a TPU host's metadata; empty for CPUs and GPUs."""
        if self.accelerator is None or self.accelerator.gpu:
            return {}
        chips = self.devices * self.accelerator.cores_counted
        return {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": f"{self.accelerator.type_name}-{chips}",
            "TPU_WORKER_HOSTNAMES": "localhost",
        }


def parse_topology(text: str) -> DeviceTopology:
    """Parse a topology such as `v5e:2x4` or `cpu:4`.

    Raises: ConfigurationError that lists the known topologies.
    """
    kind, _, shape = text.strip().lower().partition(":")
    accelerator = ACCELERATORS.get(kind)
    if accelerator is None and kind != CPU:
        raise ConfigurationError(f"{text!r} is not a topology that `phalanx plan` knows. Write one such as {_KNOWN}.")
    dimensions = 1 if accelerator is None else accelerator.dimensions
    most = MAX_GPUS if accelerator and accelerator.gpu else MAX_DEVICES
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else []
    if len(sizes) != dimensions or math.prod(sizes) > most:
        example = "cpu:4" if accelerator is None else accelerator.example
        raise ConfigurationError(
            f"{text!r}: the devices of {kind} are arranged in {dimensions} dimension{'s' * (dimensions > 1)}. Write a "
            f"topology such as {example}, with {most:,} devices at most."
        )
    return DeviceTopology(f"{kind}:{shape}", math.prod(sizes), accelerator)


def check_compiler(topology: DeviceTopology, backend: str | None) -> None:
    """Check that this machine can compile a step for a topology.

    Args:
        topology: Devices to compile for.
        backend: Keras backend, if the user has chosen one.

    Raises:
        UnsupportedError: The backend is not JAX.
        ConfigurationError: The compiler for these devices is not installed.
    """
    if backend not in (None, "", "jax"):
        raise UnsupportedError(
            f"A step is compiled for many devices only on JAX, and Keras is to run on {backend!r}. Set "
            f"KERAS_BACKEND=jax, or plan for replicas: --machines 64 --link 10Gbit."
        )
    if topology.accelerator is None:
        return
    if topology.accelerator.gpu:
        if not any(importlib.util.find_spec(plugin) for plugin in CUDA_PLUGINS):
            raise ConfigurationError(
                f'{topology.name} needs JAX with CUDA, which is not installed: pip install "jax[cuda13]". It needs no '
                f"GPU. The compiler alone, 400 MB, is in jax-cuda13-plugin and jax-cuda13-pjrt: pip install --no-deps, "
                f"in the version of jax."
            )
    elif importlib.util.find_spec("libtpu") is None:
        raise ConfigurationError(
            f'{topology.name} needs the compiler for TPUs, which is not installed: pip install "jax[tpu]". It '
            f"needs no TPU. With it installed, set JAX_PLATFORMS=cpu for programs that do not look for one."
        )
