"""What a timed script does beside its training: note the times and hand them to `benchmarks.job`.

Windows are timed by the monotonic clock. The time since the start of the job needs a clock that two processes
of one host share, so it is wall clock: `benchmarks.job` writes the moment at which it starts the job into
BENCH_STARTED.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.work import WORKS, Work

# Windows run before those that count: compilation, first touches of memory, thread pools.
WARM_UP_WINDOWS = 2


@dataclass
class Stopwatch:
    """Times of one process: the end of its first training step, then window after window."""

    work: Work
    windows: int
    first_step_s: float | None = None
    _laps: list[float] = field(default_factory=list)

    @property
    def epochs(self) -> int:
        """Windows to run in all, warm-up included."""
        return WARM_UP_WINDOWS + self.windows

    def first_step(self) -> None:
        """The first training step is finished; what comes after the first call does not count."""
        if self.first_step_s is None and "BENCH_STARTED" in os.environ:
            self.first_step_s = time.time() - float(os.environ["BENCH_STARTED"])

    def lap(self) -> None:
        """A window ends here and the next begins; the first call only begins."""
        self._laps.append(time.perf_counter())

    @property
    def ms_per_step(self) -> list[float]:
        """One figure for each timed window."""
        seconds = [after - before for before, after in zip(self._laps, self._laps[1:], strict=False)]
        return [1e3 * window / self.work.steps for window in seconds[WARM_UP_WINDOWS:]]

    def report(self, **facts: Any) -> None:
        """Give the figures to `benchmarks.job` (in the file BENCH_RESULT), or print them.

        Only one rank of a job may call this.
        """
        figures = {"work": self.work.name, "first_step_s": self.first_step_s, "ms_per_step": self.ms_per_step}
        write_result(figures | facts)

    def callbacks(self, keras: Any) -> tuple[Any, Any]:
        """Two callbacks for `fit`, of the classes of `keras`: one for the first step, one for windows.

        They go into two calls of `fit`, because a callback on batches costs time at each of them.
        A window is an epoch, from the end of one to the end of the next, whatever lies between.
        """
        stopwatch = self

        class FirstStep(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
                float((logs or {})["loss"])  # an asynchronous backend has finished the step only now
                stopwatch.first_step()

            def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
                stopwatch.first_step()  # a worker among parameter servers may have left all steps to the others

        class Windows(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
                stopwatch.lap()

            def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
                stopwatch.lap()

        return FirstStep(), Windows()

    def time_fit(self, keras: Any, fit: Callable[..., Any], *, first_steps: int = 1) -> None:
        """Time `fit(steps, **options of Keras's fit)`: the first step, then the windows.

        Args:
            keras: Keras 3 or tf_keras.
            fit: trains on data of that many steps with these options.
            first_steps: steps of the first call; the least that `fit` can do.
        """
        first_step, windows = self.callbacks(keras)
        fit(first_steps, callbacks=[first_step])
        if self.windows:
            fit(self.work.steps, epochs=self.epochs, callbacks=[windows])

    def time_loop(self, train: Callable[[Any], Any], data: Callable[[int], Any]) -> None:
        """Time a plain loop `train(data)`, where `data(steps)` has what this many steps need."""
        train(data(1))
        self.first_step()
        if self.windows:
            prepared = data(self.work.steps)
            self.lap()
            for _ in range(self.epochs):
                train(prepared)
                self.lap()


def write_result(figures: dict[str, Any]) -> None:
    """Write one job's figures to the file BENCH_RESULT; without it, print them."""
    text = json.dumps(figures)
    path = os.environ.get("BENCH_RESULT")
    if path is None:
        print(text, flush=True)
    else:
        whole = Path(path + ".part")
        whole.write_text(text)
        whole.replace(path)  # who waits for the file never reads half of it


def arguments(add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """The arguments of every timed script: `work` (a `Work`) and `windows`, and those that `add` adds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=WORKS, default="mlp64")
    parser.add_argument("--windows", type=int, default=5, help="timed windows; 0 times the first step only")
    if add is not None:
        add(parser)
    args = parser.parse_args()
    args.work = WORKS[args.work]
    return args


@dataclass(frozen=True)
class Place:
    """A peer's process in the job that `benchmarks.job` started.

    Attributes:
        ports: free TCP ports of the loopback interface, the same on every rank, one for each.
    """

    rank: int
    world_size: int
    ports: tuple[int, ...]

    @classmethod
    def from_environment(cls) -> Place:
        ports = tuple(int(port) for port in os.environ["BENCH_PORTS"].split(","))
        return cls(int(os.environ["BENCH_RANK"]), int(os.environ["BENCH_WORLD_SIZE"]), ports)

    def share(self, samples: Any) -> Any:
        """This rank's samples: of every global batch an equal part."""
        return samples[self.rank :: self.world_size].copy()
