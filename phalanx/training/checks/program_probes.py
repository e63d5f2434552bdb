"""What all ranks find out about a program before its first step, each once: the chief's findings count.

How its metrics are merged (`metric_probe`), how its losses combine (`loss_probe`), and whether the steps of replicas
are then the step of one process (`step_probe`). The first two choose how something is merged, also where nothing is
trained, and compute no more than that something. The last only judges, and takes whole steps of the program's own code.
Of evaluations and predictions, outputs are compared (`prediction_probe`).

Losses and steps are tested again at the beginning of an epoch if something is on that was off (`program_switches`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.arrays.tree import map_leaves
from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines.engine import Engine
from phalanx.errors import UnsupportedError
from phalanx.training.checks import loss_probe, prediction_probe, step_probe
from phalanx.training.checks.metric_probe import checked, find_rules, rules_of
from phalanx.training.checks.prediction_probe import Outputs
from phalanx.training.checks.tried_samples import PART, RANKS
from phalanx.training.program_effects.program_objects import reads_iterators
from phalanx.training.program_effects.program_state import ProgramState
from phalanx.training.program_effects.program_switches import Switches, find_switches, has_begun, variables_that_are_off
from phalanx.training.replica import Replica, divides_batches

_SAMPLES = max(loss_probe.ROWS, RANKS * PART)
"""Of the first batch, which are kept for tests in later epochs."""


class ChiefFinds:
    """The chief's findings hold on all replicas."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @property
    def is_chief(self) -> bool:
        """Whether this process's own findings hold."""
        return self._replica.is_chief

    @property
    def divides_batches(self) -> bool:
        """Whether steps are computed in parts."""
        return divides_batches(self._replica)

    @property
    def replicas(self) -> int:
        """Number of replicas that have a part of each batch."""
        return self._replica.world_size

    @property
    def admits_ranks(self) -> bool:
        """Whether a rank may have joined that must be told again what the others know."""
        return self._replica.elastic is not None

    def from_chief(self, found: Any) -> Any:
        """The chief's findings; all ranks must call."""
        return self._replica.retry(lambda: self._replica.broadcast_from_chief(found))


class EachFinds(NamedTuple):
    """Every process finds out the same by itself, as all of them see the whole batch; see `ChiefFinds`."""

    divides_batches: bool
    replicas: int = 1
    is_chief: bool = True
    admits_ranks: bool = False

    def from_chief(self, found: Any) -> Any:
        return found


class _Tests(NamedTuple):
    """What losses and steps were tested with."""

    data: Any
    form: ElementStructure
    steps: Sequence[str]
    switches: Switches


class ProgramProbes:
    """The probes of one model on one rank."""

    def __init__(self, model: Any, agreement: ChiefFinds | EachFinds) -> None:
        self._model = model
        self._agreement = agreement
        # The compiled loss that was examined, by identity: `compile` makes another one, whose findings are not known.
        self._losses: tuple[Any, loss_probe.Findings] | None = None
        self._tried: dict[str, tuple[Any, ...]] = {}  # what the model was compiled with when this step was tried
        self._tests: _Tests | None = None  # the last ones of losses and steps
        # What the chief has found out about outputs: where an evaluation needs it, it is the same for predictions.
        self._outputs: Outputs | None = None

    def need_a_batch(self, engine: Engine, steps: Sequence[str]) -> bool:
        """Whether there is something to find out from a batch.

        Args:
            steps: "train_step" and "test_step", as far as replicas are to take such steps together.
        """
        if not engine.metric_rules.is_decided or any(self._tries(step) for step in steps):
            return True
        if "test_step" in steps and self.need_outputs("evaluate"):
            return True
        return loss_probe.has_open_questions(self._model) and not self._knows_losses()

    def run(self, engine: Engine, data: Any, form: ElementStructure, steps: Sequence[str]) -> None:
        """Find out what there is to find out.

        Args:
            engine: of the model, built.
            data: a local batch; nothing where none is needed.
            form: its structure.
            steps: see `need_a_batch`.

        Raises: UnsupportedError on every rank, if replicas cannot compute what one process does.
        """
        is_known = not self.need_a_batch(engine, steps)
        self._decide_metric_rules(engine, data)
        self._test(engine, data, form, steps)
        if "test_step" in steps and self.relates_samples("evaluate", data, form):
            raise UnsupportedError(prediction_probe.refusal(self._model))
        if not is_known and self._may_test_again(steps):
            few = map_leaves(lambda array: np.array(array[:_SAMPLES]), data)
            self._tests = _Tests(few, form, steps, find_switches(self._model))

    def need_outputs(self, method: str) -> bool:
        """Whether `relates_samples` needs data."""
        return self._outputs is None and self._probes_outputs(method)

    def relates_samples(self, method: str, data: Any, form: ElementStructure) -> bool:
        """Whether outputs have to be computed of whole batches; all ranks must call.

        Args:
            method: "predict" or "evaluate".
            data: a local batch; nothing where none is needed.
            form: its structure.
        """
        if not self._probes_outputs(method):
            return False
        found, agreement = self._outputs, self._agreement
        if found is None and agreement.is_chief:
            found = prediction_probe.find_outputs(self._model, data, form, replicas=agreement.replicas)
        if self._outputs is None or agreement.admits_ranks:
            found = Outputs(agreement.from_chief(found and found.value))
        self._outputs = found
        return found is Outputs.BATCH or (method == "predict" and found is Outputs.OTHER_AXIS)

    def _probes_outputs(self, method: str) -> bool:
        return self._agreement.divides_batches and prediction_probe.is_needed(self._model, method)

    def begin_epoch(self, engine: Engine) -> None:
        """Test losses and steps again if callbacks have switched something on; all ranks meet here.

        Raises: UnsupportedError on every rank, as `run`; or if a loss that has begun is merged in another way, since
            compiled steps merge it as before.
        """
        tests = self._tests
        if tests is None or not self._may_test_again(tests.steps):
            return
        now = find_switches(self._model)
        has_to = self._agreement.from_chief(has_begun(tests.switches, now))
        # Once is enough: programs switch to and fro.
        was_on = {place: is_on or tests.switches.get(place, False) for place, is_on in now.items()}
        self._tests = tests._replace(switches=was_on)
        if not has_to:
            return
        former, self._losses = self._losses, None
        self._tried.clear()
        self._test(engine, tests.data, tests.form, tests.steps)
        if former and self._losses and former[1].merges != self._losses[1].merges:
            raise UnsupportedError(
                f"A loss of {self._model.name!r} that is a sum over the batch was zero when training began, and is not "
                f"now. End fit() before the epoch in which it begins, call compile() again, and continue with "
                f"fit(initial_epoch=...); or return a mean over the samples."
            )

    def _test(self, engine: Engine, data: Any, form: ElementStructure, steps: Sequence[str]) -> None:
        """Find out about losses, and then about the steps that compute them."""
        self._find_out_losses(data, form)
        for step in steps:
            if self._tries(step):
                self._try(step, engine, data, form)

    def _may_test_again(self, steps: Sequence[str]) -> bool:
        """The same on all ranks."""
        if not self._agreement.divides_batches:
            return False
        return loss_probe.has_open_questions(self._model) or any(
            step_probe.is_needed(self._model, step) for step in steps
        )

    def _decide_metric_rules(self, engine: Engine, data: Any) -> None:
        rules = engine.metric_rules
        if rules.is_decided:
            return
        found = find_rules(self._model, engine, data, replicas=self._agreement.replicas)
        if found is not rules.rules:  # else there was nothing to find out, on any rank
            own = found if isinstance(found, str) else [list(rule) for rule in found]
            chiefs = self._agreement.from_chief(own)
            found = chiefs if isinstance(chiefs, str) else rules_of(chiefs)
        rules.decide(checked(found))

    def _find_out_losses(self, data: Any, form: ElementStructure) -> None:
        """The ranks meet whether or not the chief knows already: one of them may have joined since."""
        model, agreement = self._model, self._agreement
        is_open = agreement.divides_batches and loss_probe.has_open_questions(model)
        # WHOLE elements are no (x, y): only a `train_step` of the program's own can take them apart.
        if form is ElementStructure.WHOLE or not is_open:
            return
        findings: Any = None
        if agreement.is_chief:
            if not self._knows_losses():
                self._losses = model._compile_loss, self._probe_losses(data)
            assert self._losses is not None
            findings = list(self._losses[1])
        findings = loss_probe.Findings(*agreement.from_chief(findings))
        self._losses = model._compile_loss, findings
        if findings.error:
            raise UnsupportedError(findings.error)
        loss_probe.note(model, findings)

    def _probe_losses(self, data: Any) -> loss_probe.Findings:
        model = self._model
        if reads_iterators(model):
            return loss_probe.Findings([], {})
        state = ProgramState(model, trains=False)
        with state.kept():  # a loss may count its calls
            found = loss_probe.probe(model, *data, replicas=self._agreement.replicas)
        off = [] if found.error else variables_that_are_off(model)
        if not off:
            return found
        # Of a loss that is zero nothing shows. Steps are compiled with what it is once its weight is not.
        with state.kept():
            for variable in off:
                variable.assign(0.5)
            later = loss_probe.probe(model, *data, replicas=self._agreement.replicas)
        return found if later.error else found.updated(later)

    def _knows_losses(self) -> bool:
        return self._losses is not None and self._losses[0] is self._model._compile_loss

    def _tries(self, step: str) -> bool:
        """Whether the next step of this kind is to be tried; the same on all ranks."""
        if not self._agreement.divides_batches or not step_probe.is_needed(self._model, step):
            return False
        return self._agreement.admits_ranks or self._tried.get(step) != self._compiled_with()

    def _compiled_with(self) -> tuple[Any, ...]:
        model = self._model
        return model._compile_loss, model._compile_metrics, model.optimizer

    def _try(self, step: str, engine: Engine, data: Any, form: ElementStructure) -> None:
        """All ranks try it, because it creates variables."""
        problem = ""
        # Only ranks that have not tried it take the step: in elastic jobs one that has joined since. A chief that has
        # tried it answers with "", since it would have raised otherwise.
        if self._tried.get(step) != self._compiled_with():
            problem = step_probe.find_difference(
                self._model, engine, data, form, step, replicas=self._agreement.replicas
            )
        if problem := str(self._agreement.from_chief(problem)):
            raise UnsupportedError(problem)
        self._tried[step] = self._compiled_with()
