"""The request of `phalanx plan` to the program that it runs: to measure or compile steps instead of training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import PLAN
from phalanx.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Request to examine a program.

    Attributes:
        result: File that the program writes before its first `fit` ends it.
        replicas: Number of replicas in the simulated job.
        topology: Devices to compile a step for, such as `v5e:2x4`; empty to measure a replica's step.
    """

    result: Path
    replicas: int = 1
    topology: str = ""

    def as_text(self) -> str:
        """Return the request as the value of PHALANX_PLAN."""
        return json.dumps(asdict(self) | {"result": str(self.result)})

    @classmethod
    def from_environment(cls) -> PlanRequest | None:
        """Return the request to examine this program; None if there is none."""
        text = process_environment().get(PLAN)
        return cls.from_text(text) if text else None

    @classmethod
    def from_text(cls, text: str) -> PlanRequest:
        """Parse a request. Raises: ConfigurationError if `as_text` did not write it."""
        try:
            fields = json.loads(text)
            return cls(Path(fields["result"]), int(fields["replicas"]), str(fields["topology"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{PLAN}={text!r} is not what `phalanx plan` sets. Run `phalanx plan SCRIPT` instead of setting it."
            ) from error
