"""Resources of a step that was compiled for devices that are not available, as written by the examined program."""

from __future__ import annotations

import msgspec

from phalanx.planning.hlo_collectives import HloCollective


class ProgramMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled training step. All figures are per device and equal on all devices.

    Attributes:
        devices: Number of devices that it was compiled for.
        mesh: The strategy's arrangement of the devices.
        weights: Number of trainable weights of the model.
        global_batch: Samples per step.
        argument_bytes: Size of state and batch before the step.
        output_bytes: Size of state and logs after the step.
        alias_bytes: The part of the outputs that reuses memory of the arguments.
        temporary_bytes: Peak size of temporary values.
        code_bytes: Size of the compiled code.
        flops: Floating-point operations per step.
        accessed_bytes: Bytes that the step reads and writes in device memory.
        collectives: Collectives in program order.
        host_calls: Operations that make the device wait for the host.
        refusal: The compiler's message if the step does not fit; the other figures are then unknown.
    """

    devices: int
    mesh: str
    weights: int
    global_batch: int
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    flops: float = 0.0
    accessed_bytes: float = 0.0
    collectives: tuple[HloCollective, ...] = ()
    host_calls: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def needed_bytes(self) -> int:
        """Peak device memory of the step."""
        outputs = self.output_bytes - self.alias_bytes
        return self.argument_bytes + outputs + self.temporary_bytes + self.code_bytes
