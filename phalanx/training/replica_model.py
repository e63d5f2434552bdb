"""One rank's copy of a model, and what all ranks agree on before a method of the model runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import keras
from keras import tree

from phalanx.arrays.tree import map_leaves
from phalanx.data import ShardedInput, shard_input
from phalanx.data.dataset_elements import ElementStructure, unpack
from phalanx.data.input_request import InputRequest, OrderAgreement
from phalanx.engines import make_engine, make_spmd_engine
from phalanx.engines.engine import Batch, Engine
from phalanx.keras_compat.global_batch.global_gradients import refuse_overwritten
from phalanx.keras_compat.keras_internals import print_msg
from phalanx.keras_compat.layer_building import build_layers, has_built_layers, output_shapes
from phalanx.keras_compat.model_state import builds_in_steps, is_unbuilt
from phalanx.training import callback_list, progress_bar, state_sync
from phalanx.training.checks.model_checks import (
    annotate_size_errors,
    check_batch_size,
    check_normalization,
    check_spectrograms,
    stateful_layer,
)
from phalanx.training.checks.program_probes import ChiefFindings, ProgramProbes
from phalanx.training.checks.same_program import compare_inputs, compare_samples
from phalanx.training.fit_arguments import capped
from phalanx.training.joint_batches import JointBatches, read_part
from phalanx.training.layer_building_step import build_layers_by_step
from phalanx.training.program_effects.per_rank_random_numbers import step_stream_factory, uses_rank_streams
from phalanx.training.replica import Replica, divides_batches, seed_from_program
from phalanx.training.steps.deterministic import DeterministicStepper, check_deterministic
from phalanx.training.steps.float16_overflow import Float16Overflow
from phalanx.training.steps.gradient_merge import StepMerge
from phalanx.training.steps.local_sgd import LocalSGDStepper
from phalanx.training.steps.optimizer_properties import (
    accumulation_steps,
    constant_loss_scale,
    inner_optimizers,
    scales_dynamically,
)
from phalanx.training.steps.stepper import ReplicaStepper, RetryOnMembershipChange
from phalanx.training.steps.synchronous import SynchronousStepper
from phalanx.training.training_policy import EVERY_STEP, TrainingPolicy

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ReplicaModel:
    """A compiled Keras model that several ranks train, evaluate and apply together.

    Attributes:
        model: The Keras model.
        replica: This process as a replica.
        policy: Training policy of the model.
        merge: Merges the arrays of a step over the ranks.
        probes: Determine what replicas must know about the program.
        validation: Evaluates the validation data of the running `fit`, with the given callbacks, while the program
            calls `evaluate` inside it; otherwise None.
    """

    def __init__(self, model: Any, replica: Replica, policy: TrainingPolicy = EVERY_STEP) -> None:
        self.model = model
        self.replica = replica
        self.policy = policy
        # Local SGD compresses the exchanged weights; its gradients are those of single batches.
        self.merge = StepMerge(replica, policy.compression if policy.period is None else None)
        # The same for all steps, because functions are traced for it. Local SGD accumulates no gradients.
        self.merge.accumulates = policy.period is None and accumulation_steps(model) > 1
        if policy.period is None and scales_dynamically(getattr(model, "optimizer", None)):
            self.merge.overflow = Float16Overflow()
        self.merge.loss_scale = constant_loss_scale(model)
        self.merge.synchronizes_batch_norm = policy.synchronized_batch_norm or replica.micro_batches is not None
        self._engine: Engine | None = None
        self._local_sgd: LocalSGDStepper | None = None
        self._deterministic: DeterministicStepper | None = None
        self._is_synchronized = False
        self._announced: set[Any] = set()
        self._seeds_given = 0
        self.probes = ProgramProbes(model, ChiefFindings(replica))
        self._steps_that_built: set[str] = set()
        self._has_row_outputs: dict[str, bool] = {}  # by the structure of a batch
        self._predicts_samples_independently = True
        self.validation: Callable[[Any], dict[str, Any]] | None = None

    @property
    def engine(self) -> Engine:
        """Engine of this model; available once the model is prepared."""
        assert self._engine is not None, "the model is prepared before its first batch"
        return self._engine

    # Inputs.

    def shard(
        self, x: Any, y: Any, sample_weight: Any, *, steps: int | None, seed: int | None = None, **options: Any
    ) -> ShardedInput:
        """Return this rank's part of the data passed to a method.

        Args:
            steps: Number of batches per epoch; None for all data.
            seed: Determines the sample order; if None, the chief shuffles as Keras does in jobs of fixed size.
            options: Further fields of `InputRequest`.
        """
        replica = self.replica
        rank, world_size = read_part(replica)
        request = InputRequest(
            x,
            y,
            sample_weight,
            steps_per_epoch=capped(steps, keras.config.max_steps_per_epoch(), "steps_per_epoch"),
            steps_per_execution=self.model.steps_per_execution,
            rank=rank,
            # A candidate's input is divided again when it is admitted; until then it counts as one of several.
            world_size=2 if replica.is_candidate and not replica.micro_batches else world_size,
            is_read_by_all=replica.micro_batches is not None,
            shuffling=None if replica.elastic or seed is not None else self._shuffling(),
            seed=self._new_seed() if seed is None else seed,
            **options,
        )
        return shard_input(request)

    def _new_seed(self) -> int:
        """Return a seed for one method call, equal on all ranks."""
        if self.replica.elastic is not None:
            return self.replica.common_seed()
        self._seeds_given += 1
        seed: Any = self.replica.broadcast_from_chief(seed_from_program() ^ self._seeds_given)
        return int(seed)

    def _shuffling(self) -> OrderAgreement:
        return OrderAgreement(
            is_chief=self.replica.is_chief,
            from_chief=lambda own: self.replica.communicator.broadcast([own])[0],
        )

    def single_batch(self, method: str, x: Any, y: Any = None, sample_weight: Any = None) -> JointBatches:
        """Return the one batch passed to this method, with model and ranks ready for it."""
        # The seed has no effect on a single batch, but without one the chief would have to broadcast it.
        size = len(next(leaf for leaf in tree.flatten(x) if leaf is not None))
        source = self.shard(x, y, sample_weight, batch_size=size, steps=None, seed=0)
        if method == "predict_on_batch":
            self.prepare_to_predict(source, method)
        else:
            # Keras's steps receive all three here, including None.
            source.keras_structure = unpack((x, y, sample_weight))[0]
            self.prepare(source, method).set_batch_structure(source.keras_structure)
        if not self._is_synchronized:
            state_sync.synchronize(self.model, self.replica)
            self._is_synchronized = True
        return JointBatches(source, 0, self.replica)

    def run_over(self, source: ShardedInput, action: Callable[[], T], on_change: Callable[[], None] | None = None) -> T:
        """Consume a source, and restart whenever the membership changes: lost members' counts are lost with them.

        Args:
            on_change: Divides the source among the new members; None to do it here.
        """
        replica = self.replica

        def reshard() -> None:
            source.reshard(*read_part(replica))

        if replica.elastic is None:
            return action()
        if on_change is None:
            reshard()  # the members may have changed since it was divided
        with source.recording() as rewind:

            def begin_again() -> None:
                (on_change or reshard)()
                rewind()

            return replica.retry(action, begin_again)

    # Model and engine.

    def prepare(self, source: ShardedInput, method: str, *, validation: ShardedInput | None = None) -> Engine:
        """Return the engine, with all variables created for the batches of the source passed to this method.

        Args:
            validation: Validation data of a `fit`.
        """
        self._make_engine(source, method)
        # As in Keras, no batch is read unless needed: a dataset may draw random numbers for each. If later batches
        # differ in kind from the first, `evaluate_on_replicas` detects it.
        data: Batch = (None, None, None)
        trains, is_read = method in ("fit", "train_on_batch"), False
        steps = [] if trains else ["test_step"]
        if trains and self.policy.period is None:  # local SGD does not promise the numbers of one process
            steps.append("train_step")
        tested = [*steps, *(["test_step"] if validation is not None and not validation.is_in_memory else [])]
        if _needs_a_batch(self.model) or self.probes.needs_batch(self.engine, tested):
            first = source.peek(restart=self.engine.needs_batch_to_build)
            self.engine.set_batch_structure(source.structure)
            check_batch_size(self.model, first, self.replica.world_size)
            data, is_read = first.data, True
        elif source.is_in_memory and self.probes.depends_on_batches(steps):
            data, is_read = source.peek().data, True
        with annotate_size_errors(data, self.replica.world_size):
            self.engine.build(data)
            self._build_layers_by_step(data, source.structure, "train_step" if trains else "test_step")
        known = data if is_read else None
        self.probes.run(self.engine, known, source.structure, steps, again=method == "fit")
        if validation is not None:
            seen, evaluated = source, known
            if validation.is_in_memory:
                seen, evaluated = validation, validation.peek().data
            self.probes.run(self.engine, evaluated, seen.structure, ["test_step"], again=True)
        if trains and self.policy.period is not None:
            check_normalization(self.model)
            refuse_overwritten(self.model.trainable_variables, "a replica that trains alone between two merges")
        self.probes.findings.publish()
        return self.engine

    def _build_layers_by_step(self, data: Batch, structure: ElementStructure, step: str) -> None:
        if step not in self._steps_that_built and builds_in_steps(self.model, step):
            self._steps_that_built.add(step)  # layers still unbuilt afterwards are unused
            build_layers_by_step(self.model, data, structure, step)
            self.engine.build(data)

    def prepare_to_predict(self, source: ShardedInput, method: str) -> Engine:
        """Return the engine, with the layers' variables created; a model need not be compiled to predict."""
        self._make_engine(source, method)
        if not has_built_layers(self.model):
            build_layers(self.model, source.peek().data[0])
        # As above: no batch is read without need.
        data = source.peek().data if self.probes.needs_outputs("predict") else (None, None, None)
        self._predicts_samples_independently = not self.probes.needs_whole_batches("predict", data, source.structure)
        return self.engine

    def can_predict_parts(self, data: Batch) -> bool:
        """Return whether replicas can predict parts of a batch: the first axis of each output is the sample axis, as
        far as that is known without computing the outputs, and no output depends on other samples of its batch.

        Args:
            data: A batch representative of those to come.
        """
        if self.replica.world_size == 1 and not self.replica.micro_batches:
            return True
        known = str(map_leaves(lambda array: (array.shape[1:], array.dtype.str), data[0]))
        if known not in self._has_row_outputs:
            self._has_row_outputs[known] = _outputs_are_rows(self.model, data[0])
        return self._predicts_samples_independently and self._has_row_outputs[known]

    def _make_engine(self, source: ShardedInput, method: str) -> None:
        """Create the engine if there is none. Raises DisagreementError if the ranks were given different data."""
        if self.replica.micro_batches:
            check_deterministic(self.model, trains=method in ("fit", "train_on_batch"))
        if divides_batches(self.replica):
            check_spectrograms(self.model)
        if self._engine is None:
            placement = self.policy.placement
            self._engine = (
                make_engine(self.model, self.merge) if placement is None else make_spmd_engine(self.model, placement)
            )
            if uses_rank_streams(self.replica):
                self._engine.random_state_context = step_stream_factory(self.model, self.replica)
        self.replica.retry(lambda: compare_inputs(source, self.replica, method))
        if method != "fit":  # which compares once it knows where it resumes
            self.replica.retry(lambda: compare_samples(source, self.replica))

    def synchronize(self) -> None:
        """Set every rank to the chief's state."""
        self.replica.retry(lambda: state_sync.synchronize(self.model, self.replica))

    # `fit`, `evaluate` and `predict` always synchronize first. Only `*_on_batch` rely on the flag: broadcasting the
    # whole state for each batch would cost more than the batch.
    def mark_synchronized(self) -> None:
        """Record that all ranks have the same state; otherwise `single_batch` first copies the chief's."""
        self._is_synchronized = True

    def agree_on_learning_rate(self, retry: RetryOnMembershipChange) -> None:
        """Set the chief's learning rates on every rank, because callbacks may have changed them."""
        # A schedule follows the step count, which is equal on all ranks.
        optimizers = [
            each
            for each in inner_optimizers(self.model.optimizer)
            if isinstance(getattr(each, "_learning_rate", None), keras.Variable)
        ]
        if not optimizers:
            return
        own = [float(keras.ops.convert_to_numpy(each._learning_rate.value)) for each in optimizers]
        chiefs: Any = retry(lambda: self.replica.broadcast_from_chief(own))
        for optimizer, rate, chief in zip(optimizers, own, chiefs, strict=True):
            if chief != rate:
                optimizer.learning_rate = chief

    # Steppers.

    def stepper(self, *, repeats: bool = False, accumulates: bool = False, is_single: bool = False) -> ReplicaStepper:
        """Return the stepper that takes the training steps of this model.

        Args:
            repeats: Whether another process may have to take over between any two steps.
            accumulates: Whether a rank may hold back gradients that the optimizer accumulates.
            is_single: Whether this is the step of `train_on_batch`, which holds nothing back because the program may
                save the model afterwards.
        """
        model, replica, period = self.model, self.replica, self.policy.period
        repeats = repeats or replica.elastic is not None
        if (deterministic := self.deterministic) is not None:
            return deterministic
        if period is None or is_single:
            # Gradients that a rank holds back are in no checkpoint and would be lost with it.
            accumulates = accumulates and not repeats and self.engine.merges
            return SynchronousStepper(model, self.engine, self.merge, replica, accumulates=accumulates)
        if self._local_sgd is None:
            compression = self.policy.compression
            self._local_sgd = LocalSGDStepper(model, self.engine, self.merge, replica, period, compression)
        # Data in flight between two exchanges are in no checkpoint and would be lost with a replica.
        self._local_sgd.overlaps = period.overlap and not repeats
        return self._local_sgd

    @property
    def deterministic(self) -> DeterministicStepper | None:
        """Stepper of a model whose batches are divided into micro-batches; otherwise None."""
        if self.replica.micro_batches and self._deterministic is None:
            self._deterministic = DeterministicStepper(self.model, self.engine, self.merge, self.replica)
        return self._deterministic

    # Callbacks and output.

    def build_callbacks(self, callbacks: Any, verbose: Any, **options: Any) -> Any:
        """Return the `CallbackList` of this rank; see `build_callback_list`."""
        replica = self.replica
        built = callback_list.build_callback_list(
            callbacks, self.model, is_chief=replica.is_chief, replicas=replica.world_size, verbose=verbose, **options
        )
        bar, placement = progress_bar.progress_bar(built), self.policy.placement
        if bar is not None and placement is not None:
            bar.devices = placement.mesh.devices.size
        return built

    def announce_sharding(self, source: ShardedInput, verbose: Any) -> None:
        """On the chief: log and print once how the training data are divided."""
        if not self.replica.is_chief or self.replica.is_alone:
            return
        line = source.description.policy_line
        for write, wanted in ((logger.info, True), (print_msg, verbose != 0)):
            if wanted and (write, line) not in self._announced:
                self._announced.add((write, line))
                write(line)


def _needs_a_batch(model: Any) -> bool:
    """Return whether anything must be built from a batch."""
    return is_unbuilt(model) or stateful_layer(model) is not None


def _outputs_are_rows(model: Any, x: Any) -> bool:
    """Return whether the first axis of each output is the sample axis, as far as that is known.

    Args:
        x: Input as the model receives it.
    """
    if stateful_layer(model) is not None:  # built for a fixed number of samples, and so are its outputs
        return True
    shapes = output_shapes(model, x)
    if shapes is None:  # the rows of each batch decide (`LocalOutputs`)
        return True
    return all(len(shape) > 0 and shape[0] is None for shape in shapes)
