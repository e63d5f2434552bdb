"""Keras on any backend: `fit` with a DistributedOptimizer, callbacks, saved models."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import tempfile

import keras
import numpy as np
import pytest

import phalanx.horovod.keras as hvd
from tests.support.traces import Events, named, traced

RNG = np.random.default_rng(0)
SAMPLES, BATCH = 96, 24
X = RNG.normal(size=(SAMPLES, 6)).astype("float32")
Y = (X @ RNG.normal(size=(6, 1)) + 0.1).astype("float32")
START = [RNG.normal(size=shape).astype("float32") for shape in ((6, 8), (8,), (8, 1), (1,))]


def _model(optimizer, *, same: bool = True, loss="mse", **compile_options):
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1, dtype="float32")]
    )
    model.compile(optimizer=optimizer, loss=loss, **compile_options)
    if same or hvd.rank() == 0:
        model.set_weights(START)
    return model


def _mine(array):
    """This rank's part of every global batch."""
    each = BATCH // hvd.size()
    parts = [array[i + each * hvd.rank() : i + each * (hvd.rank() + 1)] for i in range(0, SAMPLES, BATCH)]
    return np.concatenate(parts)


def _fit(model, **options):
    options = {"epochs": 2, "shuffle": False, "verbose": 0} | options
    return model.fit(_mine(X), _mine(Y), batch_size=BATCH // hvd.size(), **options)


def _fit_alone(model, **options):
    return model.fit(X, Y, **({"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0} | options))


def _same(model, reference, rtol=2e-5, atol=1e-6) -> None:
    for mine, other in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=atol)


def check_fit_trains_as_one_process_on_the_global_batches() -> None:
    for make in (
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.02),
        lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.5),
    ):
        model = _model(hvd.DistributedOptimizer(make()), same=False)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        history = _fit(model, callbacks=[broadcast, hvd.callbacks.MetricAverageCallback()])
        reference = _model(make())
        expected = _fit_alone(reference)
        _same(model, reference)
        np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-4)
        assert int(model.optimizer.iterations) == 2 * SAMPLES // BATCH


def check_options_of_the_optimizer() -> None:
    for options, factor in (
        ({"gradient_predivide_factor": 4.0}, 1.0),
        ({"op": hvd.Sum}, hvd.size()),
        ({"compression": hvd.Compression.fp16}, 1.0),
    ):
        model = _model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options))
        _fit(model)
        reference = _model(keras.optimizers.SGD(0.1 * factor))
        _fit_alone(reference)
        _same(model, reference, atol=1e-3 if "compression" in options else 1e-6)  # float16 keeps 11 bits
    for wrong, words in (
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "Average"),
        ({"op": "mean"}, "must be one of"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **wrong)
    with pytest.raises(ValueError, match="no Keras optimizer"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))


def check_backward_passes_per_step() -> None:
    for average in (False, True):
        wrapped = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        model = _model(wrapped)
        events: Events = []
        with traced(hvd, events):
            _fit(model)
        batches = 2 * SAMPLES // BATCH
        for rank in range(hvd.size()):
            parts = {name: len(named(events, name, rank)) for name in ("forward/backward", "merge", "apply")}
            assert parts == {"forward/backward": batches, "merge": batches // 2, "apply": batches // 2}
        reference = _model(keras.optimizers.SGD(0.1 if average else 0.2, gradient_accumulation_steps=2))
        _fit_alone(reference)
        _same(model, reference)


def check_loss_scaling_takes_the_same_decisions_on_every_rank() -> None:
    """An overflow on one rank skips the step on all."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = _model(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0))
    x, y = _mine(X), _mine(Y)
    if hvd.rank() == 0:
        y = y.copy()
        y[0] = np.inf
    model.fit(x, y, batch_size=BATCH // hvd.size(), epochs=1, shuffle=False, verbose=0)
    reference = _model(keras.optimizers.SGD(0.1))
    _fit_alone_without_the_first(reference)
    _same(model, reference, rtol=1e-4)


def _fit_alone_without_the_first(model) -> None:
    model.fit(X[BATCH:], Y[BATCH:], batch_size=BATCH, epochs=1, shuffle=False, verbose=0)


def check_batches_one_by_one_and_own_metrics() -> None:
    model = _model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), metrics=["mae"])
    reference = _model(keras.optimizers.SGD(0.1))
    for start in range(0, 48, 24):
        part = slice(start + 12 * hvd.rank(), start + 12 * (hvd.rank() + 1)) if hvd.size() == 2 else slice(start, None)
        logs = model.train_on_batch(X[part], Y[part], return_dict=True)
        assert {"loss", "mae"} <= logs.keys()
        reference.train_on_batch(X[start : start + 24], Y[start : start + 24])
    _same(model, reference)
    history = _fit(model, epochs=1)
    losses = hvd.allgather_object(float(history.history["mae"][0]))
    assert len(set(losses)) > 1, "metrics are each rank's own without MetricAverageCallback"


def check_several_steps_in_one_execution() -> None:
    if keras.backend.backend() == "torch":
        return  # Keras has it not there
    model = _model(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), steps_per_execution=3)
    _fit(model)
    reference = _model(keras.optimizers.Adam(0.02))
    _fit_alone(reference)
    _same(model, reference)


def check_models_without_horovod_stay_as_they_are() -> None:
    model = _model(keras.optimizers.SGD(0.1))
    if hvd.rank() == 0:
        _fit_alone(model)
    reference = _model(keras.optimizers.SGD(0.1))
    if hvd.rank() == 0:
        _fit_alone(reference)
        _same(model, reference)


def check_loops_of_ones_own() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variable = keras.Variable(np.zeros(3, "float32"))
    optimizer.build([variable])
    gradient = keras.ops.convert_to_tensor(np.full(3, hvd.rank() + 1.0, "float32"))
    optimizer.apply([gradient], [variable])
    optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), -(hvd.size() + 1.0), rtol=1e-6)
    if keras.backend.backend() == "jax":
        import jax

        with pytest.raises(NotImplementedError, match="`fit` takes care of that"):
            jax.jit(optimizer.stateless_apply)([v.value for v in optimizer.variables], [gradient], [variable.value])
        with pytest.raises(NotImplementedError, match="second jitted function"):
            jax.jit(lambda x: hvd.allreduce(x, name="x"))(gradient)
    if keras.backend.backend() == "torch":
        import torch

        weight = torch.zeros(3, requires_grad=True)
        (repeated,) = torch.autograd.grad(weight.sum(), [weight])
        optimizer.apply([repeated], [variable])
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), -(hvd.size() + 2.0), rtol=1e-6)


def check_saved_models_load_with_and_without() -> None:
    model = _model(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)))
    _fit(model)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        plain, ours = keras.models.load_model(path), hvd.load_model(path, legacy_opts=False)
        with pytest.raises(NotImplementedError, match="no legacy optimizers"):
            hvd.load_model(path, legacy_opts=True)
    names = [[kind.__name__ for kind in type(each.optimizer).__mro__] for each in (plain, ours)]
    assert ["_GradientReductionMixin" in each for each in names] == [False, True]
    assert int(plain.optimizer.iterations) == int(ours.optimizer.iterations) == 8
    _fit(model, epochs=1)
    _fit(ours, epochs=1)
    _same(ours, model)
    model = _model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.02), backward_passes_per_step=2))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        with pytest.warns(UserWarning, match="averages the gradients of 2 batches"):
            hvd.load_model(path)


def check_learning_rate_callbacks() -> None:
    size, rates = hvd.size(), []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    model = _model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.5)))
    warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2)
    decay = hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.1 if epoch >= 3 else 1.0, start_epoch=2)
    history = _fit(model, epochs=4, callbacks=[warmup, decay, Note()])
    steps = SAMPLES // BATCH
    growing = [0.4 / size * ((i + 1) / steps * (size - 1) / 2 + 1) for i in range(2 * steps)]
    np.testing.assert_allclose(rates, [*growing, *[0.4] * steps, *[0.04] * steps], rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"][-1], 0.04, rtol=1e-5)
    weights = hvd.allgather_object([w.tolist() for w in model.get_weights()])
    assert weights[0] == weights[-1]


def check_momentum_is_corrected_when_the_rate_changes() -> None:
    for optimizer, name, factor in (
        (keras.optimizers.SGD(0.1, momentum=0.9), "momentums", 0.5),
        (keras.optimizers.RMSprop(0.1, momentum=0.9), "_momentums", 0.5),
        (keras.optimizers.Muon(0.1), "momentums", 1.0),  # of gradients, in which there is no rate
    ):
        model = _model(hvd.DistributedOptimizer(optimizer))
        _fit(model, epochs=1)
        momenta = [m for m in getattr(model.optimizer, name) if m is not None]
        before = [np.array(keras.ops.convert_to_numpy(m)) for m in momenta]
        callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
        callback.set_model(model)
        callback.on_epoch_begin(1)
        callback.on_train_batch_begin(0)
        for old, new in zip(before, momenta, strict=True):
            np.testing.assert_allclose(keras.ops.convert_to_numpy(new), old * factor, rtol=1e-6)


def check_copies_of_an_optimizer_reduce() -> None:
    copies = (copy.copy, copy.deepcopy, lambda each: type(each).from_config(each.get_config()))
    reference = _model(keras.optimizers.SGD(0.1))
    _fit_alone(reference)
    for make in copies:
        original = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        for optimizer in (make(original), original):
            model = _model(optimizer)
            _fit(model)
            _same(model, reference)
    for passes in (1, 2):
        distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes)
        original = _model(keras.optimizers.LossScaleOptimizer(distributed, initial_scale=1.0))
        _fit(original, epochs=1)  # which says how the two optimizers share the work
        for make in copies:
            model = _model(make(original.optimizer))
            _fit(model)
            weights = hvd.allgather_object([w.tolist() for w in model.get_weights()])
            assert weights[0] == weights[-1]
    plain = pickle.loads(pickle.dumps(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))))
    assert type(plain) is type(keras.optimizers.SGD(0.1))


def check_metrics_that_differ_in_name_raise() -> None:
    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"a": float(hvd.rank()), "b": 1.0}
    callback.on_epoch_end(0, logs)
    assert logs == {"a": (hvd.size() - 1) / 2, "b": 1.0}
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched arguments"):
        callback.on_epoch_end(0, {"a" if hvd.rank() else "c": 1.0})


def check_functions_of_tensors() -> None:
    value = keras.ops.convert_to_tensor(np.full(2, hvd.rank() + 1.0, "float32"))
    merged = hvd.allreduce(value, op=hvd.Sum)
    assert keras.ops.is_tensor(merged)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(merged), sum(range(1, hvd.size() + 1)))
    assert keras.ops.convert_to_numpy(hvd.allgather(value)).shape == (2 * hvd.size(),)
    assert keras.ops.convert_to_numpy(hvd.broadcast(value, 0)).tolist() == [1.0, 1.0]
    # The arguments stand in the order of horovod.keras: the name comes second.
    summed = hvd.allreduce(value, "a name", False)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(summed), sum(range(1, hvd.size() + 1)))
    assert (
        keras.ops.convert_to_numpy(hvd.allreduce(value=value, name="another", op=hvd.Max)).tolist() == [hvd.size()] * 2
    )
    with pytest.raises(ValueError, match="must be True or False"):
        hvd.allreduce(value, None, "a name")


def check_a_rank_outside_of_the_process_set_trains_by_itself() -> None:
    members = hvd.add_process_set(list(range(hvd.size() - 1)))
    model = _model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=members))
    reference = _model(keras.optimizers.SGD(0.1))
    if not members.included():
        np.testing.assert_equal(model.get_weights(), reference.get_weights())
    model.optimizer.register_local_var(model.trainable_variables[0])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, process_set=members),
        hvd.callbacks.MetricAverageCallback(process_set=members),
    ]
    history = _fit(model, callbacks=callbacks)
    if not members.included():
        alone = _fit(reference)
        _same(model, reference)
        np.testing.assert_allclose(history.history["loss"], alone.history["loss"], rtol=1e-5)
    hvd.remove_process_set(members)


def check_local_variables_are_not_broadcast() -> None:
    model = _model(keras.optimizers.SGD(0.1), same=False)
    kept = model.layers[0].variables
    before = [keras.ops.convert_to_numpy(each) for each in model.variables]
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=kept)
    callback.set_model(model)
    callback.on_train_begin()
    for variable, mine in zip(model.variables, before, strict=True):
        value = keras.ops.convert_to_numpy(variable)
        is_local = any(variable is each for each in kept)
        expected = mine if is_local else hvd.broadcast_object(mine, 0)
        np.testing.assert_array_equal(value, expected)


def check_metrics_of_several_numbers_are_averaged() -> None:
    logs = {"f1": np.array([hvd.rank(), 1.0], "float32"), "loss": float(hvd.rank())}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    mean = (hvd.size() - 1) / 2
    assert logs["f1"].tolist() == [mean, 1.0]
    assert logs["loss"] == mean


def check_a_constant_multiplier_is_applied_each_epoch() -> None:
    model = _model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4)))
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, start_epoch=1, end_epoch=3)
    history = _fit(model, epochs=4, callbacks=[schedule])
    np.testing.assert_allclose(history.history["lr"], [0.4, 0.4, 0.2, 0.2], rtol=1e-6)


class _Traffic:
    """How many merges of gradients were asked for while inside, and how many bytes this rank sent."""

    def __enter__(self):
        from phalanx.horovod.controller import Controller
        from phalanx.horovod.horovod_job import current_job

        self._controller, self._submit = Controller, Controller.submit
        self._communicator = current_job().controllers[0].communicator
        self._before = self._communicator.statistics.bytes_sent
        self.merges = 0

        def submit(controller, request, *args, **kwargs):
            self.merges += request.name.endswith(".gradients")
            return self._submit(controller, request, *args, **kwargs)

        Controller.submit = submit
        return self

    def __exit__(self, *_):
        self._controller.submit = self._submit
        self.bytes = self._communicator.statistics.bytes_sent - self._before


def check_gradients_are_merged_once_for_each_update() -> None:
    """In `fit`, compiled and not, in `train_on_batch`, and in custom training loops."""
    batches = SAMPLES // BATCH
    plain = _model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with _Traffic() as each:
        _fit(plain)
    assert each.merges == 2 * batches
    for options in ({}, {"run_eagerly": True}, {"steps_per_execution": 2}):
        if keras.backend.backend() == "torch" and "steps_per_execution" in options:
            continue
        wrapped = hvd.DistributedOptimizer(
            keras.optimizers.Adam(0.02, epsilon=4e-3, global_clipnorm=0.3, weight_decay=0.1), backward_passes_per_step=4
        )
        model = _model(wrapped, **options)
        with _Traffic() as traffic:
            _fit(model)
        assert traffic.merges == 2 * batches // 4
        assert traffic.bytes < 0.5 * each.bytes
        # Gradients are summed here, and averaged there; Adam is blind to that if its epsilon has the same scale. It is
        # larger than usual, or Adam would make a step out of the rounding of a gradient near zero.
        alone = keras.optimizers.Adam(0.02, epsilon=1e-3, global_clipnorm=0.3 / 4, weight_decay=0.1)
        alone.gradient_accumulation_steps = 4
        reference = _model(alone)
        _fit_alone(reference)
        _same(model, reference, rtol=1e-4, atol=1e-5)
        assert int(keras.ops.convert_to_numpy(model.optimizer._iterations)) == 2 * batches
    # Keras's own name for it, and what is accumulated goes on from one call to the next.
    model = _model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)))
    reference = _model(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
    with _Traffic() as traffic:
        _fit(model, epochs=1)
        _fit(model, epochs=2)
    assert traffic.merges == 3 * batches // 3
    _fit_alone(reference, epochs=3)
    _same(model, reference)


def check_accumulation_in_loops_of_ones_own() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=3)
    variables = [keras.Variable(np.zeros(2, "float32")), keras.Variable(np.zeros((), "float32"))]
    total = np.zeros(2)
    with _Traffic() as traffic:
        for step in range(6):
            own = [np.full(2, hvd.rank() + 1.0 + step, "float32"), np.float32(1.0)]
            optimizer.apply([keras.ops.convert_to_tensor(value) for value in own], variables)
            total += (hvd.size() + 1) / 2 + step
            if step % 3 == 2:
                np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[0]), -total, rtol=1e-6)
                np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[1]), -(step + 1), rtol=1e-6)
    assert traffic.merges == 2


def check_accumulation_with_loss_scaling_merges_each_update() -> None:
    """The scale is decided on for each batch, by all ranks; a batch that overflows on one is left out on all, and the
    next one takes its place."""
    scaled = keras.optimizers.LossScaleOptimizer
    inside = scaled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2), initial_scale=8.0)
    around = hvd.DistributedOptimizer(scaled(keras.optimizers.SGD(0.05), initial_scale=8.0), backward_passes_per_step=2)
    batch = BATCH // hvd.size()
    for overflows, optimizer in enumerate((inside, around)):  # the first of two batches, and the one that updates
        model = _model(optimizer)
        y = _mine(Y)
        if hvd.rank() == 0:
            y[overflows * batch] = np.inf
        with _Traffic() as traffic:
            model.fit(_mine(X), y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
        assert traffic.merges == 1
        reference = _model(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
        left = np.r_[: overflows * BATCH, (overflows + 1) * BATCH : SAMPLES]
        reference.fit(X[left], Y[left], batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        _same(model, reference, rtol=1e-4)
        assert int(keras.ops.convert_to_numpy(optimizer.inner_optimizer._iterations)) == SAMPLES // BATCH - 1


def check_sync_batch_normalization_trains_as_one_process() -> None:
    def model(norm, optimizer):
        made = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8), norm(), keras.layers.Activation("tanh"), keras.layers.Dense(1)]
        )
        made.compile(optimizer, "mse")
        made.set_weights([*START[:2], np.ones(8), np.zeros(8), np.zeros(8), np.ones(8), *START[2:]])
        return made

    ours = model(hvd.SyncBatchNormalization, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    reference = model(keras.layers.BatchNormalization, keras.optimizers.SGD(0.1))
    _fit(ours)
    _fit_alone(reference)
    _same(ours, reference, rtol=1e-3, atol=1e-5)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        ours.save(path)
        again = keras.models.load_model(path)
    assert type(again.layers[1]) is hvd.SyncBatchNormalization


def check_elastic_state_of_a_model() -> None:
    rank = hvd.rank()
    model = _model(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)))
    model.set_weights([w + rank for w in START])
    state = hvd.elastic.KerasState(model, epoch=rank, batch=0)
    model.set_weights(START)
    state.restore()
    np.testing.assert_allclose(model.get_weights()[0], START[0] + rank, rtol=1e-6)
    state.sync()
    np.testing.assert_allclose(model.get_weights()[0], START[0], rtol=1e-6)
    assert state.epoch == 0
    _fit(model)
    state.commit()
    kept, steps = model.get_weights(), int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    _fit(model)
    state.restore()
    assert all(np.array_equal(a, b) for a, b in zip(kept, model.get_weights(), strict=True))
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == steps == 8
    model.set_weights(START)  # as Keras does on JAX where averages are kept and an exception ends `fit`
    state.on_reset()
    state.sync()
    assert all(np.array_equal(a, b) for a, b in zip(kept, model.get_weights(), strict=True))
    with pytest.raises(ValueError, match="must be built first"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))


def check_a_fit_is_taken_up_in_the_middle_of_an_epoch() -> None:
    """What a batch raises, even the last one, leads back to the last commit; then the rest of the epoch is made,
    whatever the order of the callbacks."""

    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            made.append(batch)
            if len(made) == raises_at:
                raise InterruptedError

    def callbacks(first):
        updates = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]
        commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=2)
        return [commit, *updates, Raises()] if first else [*updates, commit, Raises()]

    for first, raises_at in itertools.product((True, False), (7, 8)):
        made: list[int] = []
        model = _model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
        state = hvd.elastic.KerasState(model, batch=0, epoch=0)
        with pytest.raises(InterruptedError):
            _fit(model, epochs=3, callbacks=callbacks(first))
        assert (state.epoch, state.batch) == (1, raises_at - 4)
        state.restore()
        assert (state.epoch, state.batch) == (1, 2)
        assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 6
        _fit(model, epochs=3 - state.epoch, callbacks=callbacks(first))
        assert made == [0, 1, 2, 3, *[0, 1, 2, 3][: raises_at - 4], *[0, 1], *[0, 1, 2, 3]]
        assert (state.epoch, state.batch) == (3, 0)
        assert not model.stop_training
        assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 12


def check_a_local_embedding_trains_by_itself() -> None:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(12, 4), layers.Flatten(), layers.Dense(1)]
    )
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.layers[0])
    model.compile(optimizer, "mse")
    words = np.random.default_rng(hvd.rank()).integers(0, 12, (8, 5))
    model.fit(words, words.sum(1, keepdims=True), batch_size=4, verbose=0)
    table, *others = (hvd.allgather_object(w.tolist()) for w in model.get_weights())
    assert table[0] != table[-1]
    assert all(each == other[0] for other in others for each in other)


def check_gradients_of_local_layers_are_not_merged() -> None:
    for options in ({}, {"backward_passes_per_step": 2, "average_aggregated_gradients": True}):
        model = _model(keras.optimizers.SGD(0.1))
        wrapped = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=model.layers[0], scale_local_gradients=False, **options
        )
        model.compile(wrapped, "mse")
        _fit(model, epochs=1)
        first, *_, last = (hvd.allgather_object(w.tolist()) for w in model.get_weights())
        assert all(each == last[0] for each in last)
        assert first[0] != first[-1]
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0))
    variables = [keras.Variable(np.zeros(2, "float32")) for _ in range(2)]
    optimizer.register_local_var(variables[0])
    gradient = np.full(2, hvd.rank() + 1.0, "float32")
    optimizer.apply([keras.ops.convert_to_tensor(gradient)] * 2, variables)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[0]), -gradient / hvd.size(), rtol=1e-6)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[1]), -(hvd.size() + 1) / 2, rtol=1e-6)
    with pytest.raises(ValueError, match="not built"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=keras.layers.Dense(1))
