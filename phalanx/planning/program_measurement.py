"""What a step needs that was compiled for devices which are not there, as the examined program writes it."""

from __future__ import annotations

import msgspec

from phalanx.planning.hlo_collectives import HloCollective


class ProgramMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled training step. All figures are of one device, which all others equal.

    Attributes:
        devices: for how many it was compiled.
        mesh: how the strategy arranges them.
        weights: number of trainable weights of the model.
        global_batch: samples of a step.
        argument_bytes: state and batch, before the step.
        output_bytes: state and logs, after it.
        alias_bytes: of the outputs, what takes the memory of arguments.
        temporary_bytes: at most, at one time.
        code_bytes: of the program.
        flops: floating point operations.
        accessed_bytes: that arithmetic reads and writes in the device's memory.
        collectives: in their order.
        host_calls: what makes the device wait for the host.
        refusal: the compiler's words, if the step does not fit; all that is known of it then.
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
        """Memory of the device at the step's height."""
        outputs = self.output_bytes - self.alias_bytes
        return self.argument_bytes + outputs + self.temporary_bytes + self.code_bytes
