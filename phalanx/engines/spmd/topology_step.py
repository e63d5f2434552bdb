"""Compiles a training step for devices that need not exist, and reads its requirements from the compiled program."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import keras
from jax.experimental import topologies

from phalanx.engines.engine import Batch
from phalanx.engines.spmd.placement import DATA, Placement, make_mesh
from phalanx.engines.spmd.step_programs import UncompiledStep, uncompiled_step
from phalanx.errors import ConfigurationError
from phalanx.planning.accelerators import DeviceTopology
from phalanx.planning.hlo_collectives import find_collectives, find_host_calls
from phalanx.planning.program_measurement import ProgramMeasurement

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def measure_step(model: Any, placement: Placement | None, data: Batch, topology: DeviceTopology) -> ProgramMeasurement:
    """Compile a training step for a device, and measure the program. Nothing is computed.

    Args:
        model: A compiled model.
        placement: The strategy's placement, on as many devices of this machine's CPU as the topology has; None: the
            whole model on each device.
        data: A global batch, or anything with its shapes and dtypes.
        topology: The devices to compile for.

    Raises: ConfigurationError if there is no such topology, or the placement has another number of devices.
    """
    placement = placement or _mirrored()
    devices = None if topology.accelerator is None else _devices(topology)
    step = uncompiled_step(model, placement, data, devices)
    weights = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    samples = next(int(leaf.shape[0]) for leaf in keras.tree.flatten(data) if leaf is not None)
    measured = _measure(step, topology.devices)
    if not measured.get("flops") and "refusal" not in measured:  # the compiler for GPUs does not count them
        measured["flops"] = _flops(uncompiled_step(model, placement, data, None)) / topology.devices
    return ProgramMeasurement(
        devices=topology.devices, mesh=str(placement), weights=weights, global_batch=samples, **measured
    )


def _measure(step: UncompiledStep, devices: int) -> dict[str, Any]:
    try:
        compiled = step.function.lower(*step.arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        # For a plan, a step that does not fit into memory is a result, not an error.
        if OUT_OF_MEMORY not in str(error):
            raise
        return {"refusal": _first_sentences(str(error))}
    memory, costs, text = compiled.memory_analysis(), compiled.cost_analysis() or {}, compiled.as_text()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "flops": costs.get("flops", 0.0),
        "accessed_bytes": costs.get("bytes accessed", 0.0),
        "collectives": tuple(find_collectives(text, devices)),
        "host_calls": tuple(find_host_calls(text)),
    }


def _flops(step: UncompiledStep) -> float:
    """Return the FLOPs of all devices in total, before the compiler divides the step."""
    return float(step.function.lower(*step.arguments).cost_analysis().get("flops", 0.0))


def _first_sentences(error: str) -> str:
    """Return how much memory the compiler would need, without its list of the largest values."""
    text = " ".join(error.partition(OUT_OF_MEMORY)[2].lstrip(": ").split())
    return re.split(r"(?<=hbm\.) |Largest program|Total hbm usage", text, maxsplit=1)[0][:400].strip()


def _mirrored() -> Placement:
    devices = keras.distribution.list_devices()
    return Placement(make_mesh((len(devices),), (DATA,), devices), (DATA,), DATA)


def _devices(topology: DeviceTopology) -> list[Any]:
    if topology.accelerator is not None and topology.accelerator.gpu is not None:
        target = topology.accelerator.gpu.as_text()
        slices = f"1x1x{topology.devices}"  # slices, hosts of each, devices of each
        return list(topologies.get_topology_desc(topology.name, "cuda", topology=slices, target_config=target).devices)
    try:
        found = topologies.get_topology_desc(topology.name, "tpu").devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigurationError(
            f"The TPU compiler has no topology {topology.name!r}: {str(error).splitlines()[0]}. Write one that is a "
            f"multiple of a host, such as {topology.accelerator.example if topology.accelerator else ''}."
        ) from error
    if len(found) != topology.devices:
        raise ConfigurationError(
            f"{topology.name!r} has {len(found)} devices for the TPU compiler, and {topology.devices} by its name."
        )
    return list(found)
