"""Descriptions of an input for users: how it is divided, and errors about it."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.data.sharding_policy import AutoShardPolicy
from phalanx.data.source import Source
from phalanx.errors import ConfigurationError

_POLICY_PHRASES = {
    AutoShardPolicy.DATA: "each of the {n} replicas takes its part of every global batch",
    AutoShardPolicy.FILE: "each of the {n} replicas reads its own files",
    AutoShardPolicy.OFF: "each of the {n} replicas reads all of its own dataset",
    AutoShardPolicy.HINT: "each of the {n} replicas reads the shard that the dataset names",
}


@dataclass(frozen=True, slots=True)
class InputDescription:
    """Describes a source for `world_size` ranks."""

    source: Source
    steps_per_epoch: int | None
    world_size: int

    @property
    def signature(self) -> str:
        """A line that is equal on all ranks that were given the same data; compared before training.

        It contains lengths, shapes and dtypes, so a difference in the lengths of uniform inputs is found before a rank
        waits for the others.
        """
        traits = self.source.traits
        return f"{traits.signature}, policy {traits.policy.name}, steps {self.steps_per_epoch}"

    @property
    def policy_line(self) -> str:
        """One-line description of how the input is divided, and why."""
        traits = self.source.traits
        phrase = _POLICY_PHRASES[traits.policy].format(n=self.world_size)
        return f"Input sharding: {traits.policy.name} ({traits.kind}): {phrase}; {traits.reason}."

    def explain(self) -> str:
        """Return the policy line, then one line per rank that says what it reads."""
        describe = self.source.traits.describe_share or self._describe_part
        lines = [f"  rank {rank} {describe(rank, self.world_size)}" for rank in range(self.world_size)]
        return "\n".join([self.policy_line, *lines])

    def _describe_part(self, rank: int, world_size: int) -> str:
        whole = f"reads every batch of the {self.source.traits.kind}"
        return whole if world_size == 1 else f"{whole} and keeps its part {rank + 1} of {world_size}"

    @property
    def disagreement(self) -> str:
        """The error message for ranks whose fingerprints of a batch differ, with advice."""
        return (
            f"The ranks read different global batches from the {self.source.traits.kind}, so cutting them would "
            "use some samples twice and others never. Every rank must read the same data in the same order. "
            "Give each shuffle a seed (`dataset.shuffle(n, seed=1)`, `Dataset.list_files(..., seed=1)`, "
            "`numpy.random.default_rng(seed)`, or `keras.utils.set_random_seed(seed)` before the data is "
            "made), and list files in sorted order. If each rank is meant to read data of its own, pass "
            "`strategy.distribute_datasets_from_function(fn)` to fit instead."
        )

    def empty_error(self, rank: int) -> ConfigurationError:
        """The error for an input without any batch."""
        return ConfigurationError(
            f"The input is empty: {self.source.traits.kind} gave no batch on rank {rank} of "
            f"{self.world_size}. Expected at least one batch. Check the paths, filters and `take`/`skip` of "
            "the pipeline, and that a generator was not used up before."
        )
