"""Probes that determine, once and before the first step, what all ranks must know. The chief's findings apply.

They determine how metrics are merged (`metric_probe`), how losses combine (`loss_probe`), and whether the steps of
replicas amount to the step of one process (`step_probe`). The first two decide how values are merged, also if nothing
is trained, and compute only the metrics or losses. The last only judges, and runs whole steps of the program's code.
For evaluations and predictions, outputs are compared (`prediction_probe`).

Losses and steps are tested again at the start of an epoch if something has been switched on (`program_switches`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from phalanx.arrays.tree import map_leaves
from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines.engine import Engine
from phalanx.errors import DisagreementError, UnsupportedError
from phalanx.training.checks import loss_probe, prediction_probe, step_probe
from phalanx.training.checks.metric_probe import find_rules, rules_from_message, rules_or_raise
from phalanx.training.checks.prediction_probe import OutputDependence
from phalanx.training.checks.trial_samples import TRIAL_PART_SIZE, TRIAL_RANKS
from phalanx.training.program_effects.program_objects import reads_iterators
from phalanx.training.program_effects.program_state import ProgramState
from phalanx.training.program_effects.program_switches import (
    Switches,
    find_switches,
    was_switched_on,
    zero_switch_variables,
)
from phalanx.training.replica import Replica, divides_batches
from phalanx.transport.decoding import decode_message

_SAMPLES = max(loss_probe.ROWS, TRIAL_RANKS * TRIAL_PART_SIZE)
"""Number of samples of the first batch that are kept for tests in later epochs."""
FINDINGS_TIMEOUT_S = 30.0
"""Time for which a candidate waits for the members' findings. They publish before their first step, but may wait for
this process before that."""
POLL_S = 0.1
_LOSSES_ONLY = ""
"""Used instead of a step if replicas do not take the same steps (local SGD)."""


class ChiefFindings:
    """Findings about the program, of which the chief's apply on all replicas.

    The members of an elastic job publish their findings. A candidate uses those instead of its own, which may differ:
    it tests with other samples, and has not seen what members trained on earlier.

    Attributes:
        by_subject: The findings that apply, by subject.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.by_subject: dict[str, Any] = {}
        self._received: dict[str, Any] | None = None  # what a candidate has received

    @property
    def is_chief(self) -> bool:
        """Whether this process's own findings apply."""
        return self._replica.is_chief or self._replica.is_candidate

    @property
    def divides_batches(self) -> bool:
        """Whether steps are computed in parts."""
        return divides_batches(self._replica)

    @property
    def replicas(self) -> int:
        """Number of replicas that have a part of each batch."""
        if self._replica.is_candidate:
            return max(2, self._replica.present_entry.members)
        return self._replica.world_size

    @property
    def may_gain_ranks(self) -> bool:
        """Whether a rank may have joined to which the findings must be sent again."""
        return self._replica.elastic is not None

    @property
    def allows_probing_mid_pass(self) -> bool:
        """Whether probes may run in the middle of a pass. A membership change would interrupt it, and deterministic
        steps, which compute micro-batches, are not tested there."""
        return not self.may_gain_ranks and not self._replica.micro_batches

    def from_chief(self, subject: str, found: Any) -> Any:
        """Return the chief's findings about this subject; all ranks must call."""
        replica = self._replica
        if replica.is_candidate:
            if self._received is None:
                self._received = self._await_published()
            agreed = self._received.get(subject, found)
        else:
            agreed = replica.retry(lambda: replica.broadcast_from_chief(found))
        self.by_subject[subject] = agreed
        return agreed

    def publish(self) -> None:
        """Publish the findings to candidates. All ranks must call, because each may become chief."""
        entry = self._replica.present_entry
        # Candidates see only the outer call.
        if self._replica.elastic is not None and not self._replica.is_candidate and not entry.depth:
            entry.findings = msgspec.msgpack.encode(self.by_subject)
            self._replica.announce_entry()

    def _await_published(self) -> dict[str, Any]:
        """As a candidate, return the members' findings; empty if they do not publish them in time."""
        entry, elastic = self._replica.present_entry, self._replica.elastic
        assert elastic is not None
        until = time.monotonic() + FINDINGS_TIMEOUT_S
        while not entry.findings and time.monotonic() < until:
            entry.fetch(elastic)
            time.sleep(POLL_S)
        return decode_message(entry.findings, dict[str, Any]) if entry.findings else {}


class LocalFindings:
    """Findings of processes that all see the whole batch, and so find the same; see `ChiefFindings`."""

    replicas = 1
    is_chief = True
    may_gain_ranks = allows_probing_mid_pass = False

    def __init__(self, *, divides_batches: bool) -> None:
        self.divides_batches = divides_batches
        self.by_subject: dict[str, Any] = {}

    def from_chief(self, subject: str, found: Any) -> Any:
        return found

    def publish(self) -> None:
        pass


class _Sample(NamedTuple):
    """The batch with which losses and steps were tested."""

    data: Any
    structure: ElementStructure

    @property
    def kind(self) -> str:
        """Key of batches that a step treats equally: whether there are sample weights, which parts are dictionaries."""
        return f"{self.structure} {map_leaves(np.ndim, self.data)}"


class ProgramProbes:
    """Probes of one model on one rank.

    Attributes:
        findings: The findings that apply on all ranks.
    """

    def __init__(self, model: Any, findings: ChiefFindings | LocalFindings) -> None:
        self._model = model
        self.findings = findings
        # Findings about the compiled loss, by kind of batch. `compile` creates a new, unknown loss.
        self._compiled_loss: Any = None
        self._losses: dict[str, loss_probe.Findings] = {}
        # What the model was compiled with when this step was tried on such batches.
        self._tried: dict[tuple[str, str], tuple[Any, ...]] = {}
        # Samples of the steps that may be tested again, and what was switched on at the time.
        self._tests: dict[str, _Sample] = {}
        self._switches: Switches = {}
        # The chief's findings about outputs: if an evaluation needs them, they hold for predictions, too.
        self._outputs: OutputDependence | None = None

    def needs_batch(self, engine: Engine, steps: Sequence[str]) -> bool:
        """Whether a batch would show something that is not known yet.

        Args:
            steps: The steps that replicas take together: "train_step", "test_step" or both.
        """
        compiled = self._compiled_with()
        tried = {step for (step, _), with_ in self._tried.items() if with_ == compiled}
        if not engine.metric_rules.is_decided or any(self._must_try(step) and step not in tried for step in steps):
            return True
        if "test_step" in steps and self.needs_outputs("evaluate"):
            return True
        return self._must_probe_losses and not self._losses_of_compiled

    def depends_on_batches(self, steps: Sequence[str]) -> bool:
        """Whether anything depends on the kind of batches; the same on all ranks."""
        return self._must_probe_losses or any(map(self._must_try, steps))

    def _is_probed(self, step: str, data: Any, structure: ElementStructure) -> bool:
        """Whether such batches would show nothing new; the same on all ranks."""
        if not self.depends_on_batches([step]):
            return True
        kind = _Sample(data, structure).kind
        has_losses = self._must_probe_losses and structure is not ElementStructure.WHOLE  # see `_determine_losses`
        knows_losses = not has_losses or kind in self._losses_of_compiled
        knows_step = not self._must_try(step) or self._tried.get((step, kind)) == self._compiled_with()
        return knows_losses and knows_step

    def examine(self, engine: Engine, step: str, data: Any, structure: ElementStructure) -> None:
        """Probe the first batch of a pass if its kind is new; all ranks must call. Validation data, or the data of a
        later `fit`, may have sample weights that earlier data lack.

        Args:
            engine: Engine of the model; it has begun.

        Raises: see `run`.
        """
        if not self.findings.allows_probing_mid_pass or self._is_probed(step, data, structure):
            return
        engine.end()
        try:
            self.run(engine, data, structure, [step], again=step == "train_step")
        finally:
            engine.begin()

    def run(
        self, engine: Engine, data: Any, structure: ElementStructure, steps: Sequence[str], *, again: bool = False
    ) -> None:
        """Run all probes that are needed; all ranks must call.

        Args:
            engine: Engine of the model, built.
            data: Local batch; None if none was read because each step is already known.
            structure: Structure of the batch.
            steps: See `needs_batch`.
            again: Whether these steps are tested again in later epochs; see `begin_epoch`.

        Raises: UnsupportedError on every rank, if replicas cannot compute what one process does.
        """
        sample = None if data is None else _Sample(data, structure)
        self._decide_metric_rules(engine, data)
        self._test(engine, sample, steps)
        if again and sample is not None and self.depends_on_batches(steps):
            few = map_leaves(lambda array: np.array(array[:_SAMPLES]), data)
            self._tests |= dict.fromkeys(steps or [_LOSSES_ONLY], _Sample(few, structure))
            self._switches = find_switches(self._model)
        if "test_step" in steps and self.needs_whole_batches("evaluate", data, structure):
            raise UnsupportedError(prediction_probe.refusal_message(self._model))

    def needs_outputs(self, method: str) -> bool:
        """Whether `needs_whole_batches` needs data."""
        return self._outputs is None and self._probes_outputs(method)

    def needs_whole_batches(self, method: str, data: Any, structure: ElementStructure) -> bool:
        """Whether outputs must be computed from whole batches; all ranks must call.

        Args:
            method: The method, "predict" or "evaluate".
            data: Local batch; empty if none is needed.
            structure: Structure of the batch.
        """
        if not self._probes_outputs(method):
            return False
        found, findings = self._outputs, self.findings
        if found is None and findings.is_chief:
            found = prediction_probe.find_output_dependence(self._model, data, structure, replicas=findings.replicas)
        if self._outputs is None or findings.may_gain_ranks:
            found = OutputDependence(findings.from_chief("outputs", found and found.value))
        self._outputs = found
        return found is OutputDependence.BATCH or (method == "predict" and found is OutputDependence.OTHER_AXIS)

    def _probes_outputs(self, method: str) -> bool:
        return self.findings.divides_batches and prediction_probe.is_needed(self._model, method)

    def begin_epoch(self, engine: Engine) -> None:
        """Test losses and steps again if callbacks have switched something on; all ranks must call.

        Raises: UnsupportedError on every rank, as `run` does, or if a loss that has begun must be merged in another
        way, because compiled steps keep merging it as before.
        """
        if not self._must_probe_losses and not any(map(self._must_try, self._tests)):
            return
        now = find_switches(self._model)
        # The chief's list: a member that joined later may not know all of them.
        wanted = self.findings.from_chief("again", list(self._tests) if was_switched_on(self._switches, now) else [])
        # Once is enough: programs switch back and forth.
        self._switches = {place: is_on or self._switches.get(place, False) for place, is_on in now.items()}
        if not wanted:
            return
        former, self._losses = self._losses, {}
        self._tried.clear()
        for step in wanted:
            self._test(engine, self._tests.get(step), [] if step == _LOSSES_ONLY else [step])
        self.findings.publish()
        if any(_merge_differently(former[kind], now) for kind, now in self._losses.items() if kind in former):
            raise UnsupportedError(
                f"A loss of {self._model.name!r} is a sum over the batch now, and was zero or a mean when training "
                f"began. End fit() before the epoch in which it begins, call compile() again, and continue with "
                f"fit(initial_epoch=...); or return a mean over the samples."
            )

    def _test(self, engine: Engine, sample: _Sample | None, steps: Sequence[str]) -> None:
        """Probe the losses, and then the steps that compute them."""
        self._determine_losses(sample)
        for step in steps:
            if self._must_try(step):
                self._try_step(step, engine, sample)

    def _decide_metric_rules(self, engine: Engine, data: Any) -> None:
        rules = engine.metric_rules
        if rules.is_decided:
            return
        found = find_rules(self._model, engine, data, replicas=self.findings.replicas)
        if found is not rules.rules:  # otherwise no rank had anything to determine
            own = found if isinstance(found, str) else [list(rule) for rule in found]
            chiefs = self.findings.from_chief("metrics", own)
            found = chiefs if isinstance(chiefs, str) else rules_from_message(chiefs)
        rules.decide(rules_or_raise(found))

    def _determine_losses(self, sample: _Sample | None) -> None:
        """Probe the losses. All ranks take part even if the chief knows the answer, because one may have joined."""
        model = self._model
        # WHOLE elements are not (x, y): only a custom `train_step` can unpack them.
        is_whole = sample is not None and sample.structure is ElementStructure.WHOLE
        if is_whole or not self._must_probe_losses:
            return
        known, nothing = self._losses_of_compiled, loss_probe.Findings({})
        found: Any = None
        if self.findings.is_chief:
            own = nothing
            if sample is not None:
                own = known.get(sample.kind) or self._probe_losses(sample.data)
            merged = own
            for other in known.values():
                merged = other.updated(merged)
            found = [list(own), list(merged)]
        of_sample, of_all = self.findings.from_chief(f"losses {sample and sample.kind}", found)
        findings = loss_probe.Findings(*of_sample)
        if findings.error:
            raise UnsupportedError(findings.error)
        for loss in chain.from_iterable(findings.conflicts_with(other) for other in known.values()):
            raise UnsupportedError(loss_probe.conflict_error(model, loss))
        if sample is not None:
            known[sample.kind] = findings
        loss_probe.record_findings(model, loss_probe.Findings(*of_all))

    def _probe_losses(self, data: Any) -> loss_probe.Findings:
        model = self._model
        if reads_iterators(model):
            return loss_probe.Findings({})
        state = ProgramState(model, trains=False)
        with state.restored_on_exit():  # a loss may count its calls
            found = loss_probe.probe(model, *data, replicas=self.findings.replicas)
        off = [] if found.error else zero_switch_variables(model)
        if not off:
            return found
        # A loss that is zero reveals nothing. Steps are compiled for its behavior when its weight is not zero.
        with state.restored_on_exit():
            for variable in off:
                variable.assign(0.5)
            later = loss_probe.probe(model, *data, replicas=self.findings.replicas)
        return found if later.error or found.conflicts_with(later) else found.updated(later)

    @property
    def _losses_of_compiled(self) -> dict[str, loss_probe.Findings]:
        """Findings about the compiled loss, by kind of batch."""
        if self._compiled_loss is not self._model._compile_loss:
            self._compiled_loss, self._losses = self._model._compile_loss, {}
        return self._losses

    @property
    def _must_probe_losses(self) -> bool:
        """Whether there are losses to probe; the same on all ranks."""
        return self.findings.divides_batches and loss_probe.needs_probing(self._model)

    def _must_try(self, step: str) -> bool:
        """Whether to try steps of this kind; the same on all ranks."""
        return self.findings.divides_batches and step_probe.is_needed(self._model, step)

    def _compiled_with(self) -> tuple[Any, ...]:
        model = self._model
        return model._compile_loss, model._compile_metrics, model.optimizer

    def _try_step(self, step: str, engine: Engine, sample: _Sample | None) -> None:
        """Try the step on all ranks, because it creates variables."""
        place, compiled = (step, sample.kind if sample is not None else ""), self._compiled_with()
        is_new = sample is not None and self._tried.get(place) != compiled
        if not is_new and not self.findings.may_gain_ranks:
            return
        # In elastic jobs, only ranks that joined later take the step. A chief that has tried it answers "", because
        # otherwise it would have raised.
        problem = ""
        if sample is not None and is_new:
            problem = step_probe.find_difference(
                self._model, engine, sample.data, sample.structure, step, replicas=self.findings.replicas
            )
        if problem := str(self.findings.from_chief(step, problem)):
            raise UnsupportedError(problem)
        if sample is not None:
            self._tried[place] = compiled


def check_chiefs_findings(chiefs: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise DisagreementError if the findings of this joining process differ from the members'."""
    for subject in chiefs.keys() & own.keys():
        if chiefs[subject] != own[subject]:
            raise DisagreementError(
                f"This worker has found out something else about the program ({subject}) than the members, whose "
                f"losses, metrics or steps have changed meanwhile, or work on other data. It cannot join now."
            )


def _merge_differently(before: loss_probe.Findings, now: loss_probe.Findings) -> bool:
    """Whether steps compiled with the earlier findings merge a loss incorrectly."""
    return bool(before.conflicts_with(now) or now.sums - before.sums)
