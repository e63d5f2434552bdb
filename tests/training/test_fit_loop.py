"""The loop of `fit`, with a coordination that only records what it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras

from phalanx.training.fit_arguments import FitArguments
from phalanx.training.fit_loop import FitLoop
from phalanx.training.fit_state import FitState

BATCHES = 3


@dataclass
class Batch:
    step: int
    data: tuple[Any, Any, Any] = (None, None, None)
    size: int = 4
    global_size: int = 8
    share: float = 0.5


class Stepper:
    def train(self, batch: Any, *, last: bool | None = None) -> None:
        pass

    def logs(self) -> dict[str, float]:
        return {"loss": 1.0}


class Recording:
    """A coordination of one process that trains `BATCHES` batches in each epoch.

    Args:
        abandoned: Epochs that end without logs, because the chief has gone back; each once.
        stops_at: The step after which an epoch stops.
    """

    def __init__(self, state: FitState, *, group: int = 1, abandoned: set[int] | None = None, stops_at: int = -1):
        self.calls: list[str] = []
        self.steps_per_group = group
        self._state = state
        self._abandoned = abandoned or set()
        self._stops_at = stops_at
        self._steps: Iterator[int] = iter(())
        self._step = -1

    def begin(self) -> None:
        self._state.callbacks.on_train_begin()

    def is_over(self) -> bool:
        return self._state.epoch >= self._state.arguments.epochs

    def begin_epoch(self) -> bool:
        return True

    @contextmanager
    def epoch_batches(self) -> Iterator[None]:
        self._steps = iter(range(BATCHES))
        self.calls.append(f"epoch {self._state.epoch}")
        yield
        self.calls.append("all batches")

    def next_batch(self) -> Batch | None:
        step = next(self._steps, None)
        if step is None:
            return None
        self._step = step
        return Batch(step)

    def begin_group(self) -> None:
        self.calls.append(f"agree before {self._step}")

    def train_step(self, batch: Batch) -> Batch:
        self.calls.append(f"train {batch.step}")
        return batch

    def end_group(self, step: int) -> bool:
        return step == self._stops_at

    def epoch_logs(self) -> dict[str, Any] | None:
        if self._state.epoch in self._abandoned:
            self._abandoned.discard(self._state.epoch)
            self.calls.append("abandoned")
            return None
        return {"loss": 1.0}

    def evaluate(self) -> dict[str, Any]:
        self.calls.append("evaluate")
        return {"loss": 2.0}

    def merge_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        return logs

    def end_epoch(self) -> None:
        self._state.epoch += 1

    @contextmanager
    def end(self) -> Iterator[None]:
        self.calls.append("end")
        yield


class Hooks(keras.callbacks.Callback):
    """Records the hooks of single batches among the calls of the coordination."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(f"begin {batch}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(f"end {batch}")


def run(**options: Any) -> tuple[list[str], Any]:
    """The calls in their order, and the `History`."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    arguments = FitArguments(**options.pop("arguments", {}))
    state, hooks = FitState(arguments=arguments), Hooks()
    state.stepper = Stepper()
    callbacks = keras.callbacks.CallbackList([hooks], add_history=True, model=model)
    state.use_callbacks(callbacks)
    coordination = Recording(state, **options)
    hooks.calls = coordination.calls
    return coordination.calls, FitLoop(model, state, coordination).run()


def test_ranks_agree_after_the_hooks_of_a_batch_and_before_its_step() -> None:
    calls, history = run()
    steps = [(f"begin {n}", f"agree before {n}", f"train {n}", f"end {n}") for n in range(BATCHES)]
    assert calls == ["epoch 0", *(call for step in steps for call in step), "all batches", "end"]
    assert history.history == {"loss": [1.0]}


def test_callbacks_see_the_first_and_the_last_step_of_a_group() -> None:
    calls, _ = run(group=2)
    hooks = [call for call in calls if call.startswith(("begin", "end "))]
    assert hooks == ["begin 0", "end 1", "begin 2", "end 3"], "Keras, too, names the last step of a whole group"


def test_an_epoch_stops_where_the_coordination_says_so() -> None:
    calls, _ = run(stops_at=1)
    assert [call for call in calls if call.startswith("train")] == ["train 0", "train 1"]


def test_an_abandoned_epoch_leaves_no_history_and_is_not_validated() -> None:
    validates = {"validation_data": ([1.0], [1.0])}
    calls, history = run(abandoned={0}, arguments=validates)
    assert calls.count("epoch 0") == 2
    assert calls.count("evaluate") == 1
    assert history.history == {"loss": [1.0], "val_loss": [2.0]}


def test_validation_follows_its_frequency() -> None:
    calls, history = run(arguments={"epochs": 4, "validation_data": ([1.0], [1.0]), "validation_freq": 2})
    assert calls.count("evaluate") == 2
    assert history.history == {"loss": [1.0] * 4, "val_loss": [2.0] * 2}
