"""Records the times of a timed script and passes them to `benchmarks.job`.

Windows are timed with the monotonic clock. The time since the start of the job needs a clock that two processes of one
host share, so it is wall-clock time: `benchmarks.job` sets BENCH_STARTED to the time at which it starts the job.
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

# Windows before those that count: compilation, first memory accesses, thread pools.
WARM_UP_WINDOWS = 2


@dataclass
class Stopwatch:
    """Times of one process: the end of its first training step, then each window."""

    work: Work
    windows: int
    first_step_s: float | None = None
    _laps: list[float] = field(default_factory=list)

    @property
    def epochs(self) -> int:
        """Total number of windows to run, including warm-up."""
        return WARM_UP_WINDOWS + self.windows

    def first_step(self) -> None:
        """Record the end of the first training step. Later calls do not count."""
        if self.first_step_s is None and "BENCH_STARTED" in os.environ:
            self.first_step_s = time.time() - float(os.environ["BENCH_STARTED"])

    def lap(self) -> None:
        """End a window and begin the next. The first call only begins one."""
        self._laps.append(time.perf_counter())

    @property
    def ms_per_step(self) -> list[float]:
        """Milliseconds per step, for each timed window."""
        seconds = [after - before for before, after in zip(self._laps, self._laps[1:], strict=False)]
        return [1e3 * window / self.work.steps for window in seconds[WARM_UP_WINDOWS:]]

    def report(self, **facts: Any) -> None:
        """Pass the figures to `benchmarks.job` (in the file BENCH_RESULT), or print them.

        Only one rank of a job may call this.
        """
        figures = {"work": self.work.name, "first_step_s": self.first_step_s, "ms_per_step": self.ms_per_step}
        write_result(figures | facts)

    def callbacks(self, keras: Any) -> tuple[Any, Any]:
        """Create two callbacks for `fit` with the classes of `keras`: one for the first step, one for windows.

        They are for two calls of `fit`, because a callback on batches costs time for each batch. A window is an epoch,
        from the end of one to the end of the next, including everything in between.
        """
        stopwatch = self

        class FirstStep(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
                float((logs or {})["loss"])  # an asynchronous backend finishes the step only here
                stopwatch.first_step()

            def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
                stopwatch.first_step()  # with parameter servers, the other workers may have taken all steps

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
            fit: Function that trains on data of this many steps with these options.
            first_steps: Number of steps of the first call, the minimum that `fit` can take.
        """
        first_step, windows = self.callbacks(keras)
        fit(first_steps, callbacks=[first_step])
        if self.windows:
            fit(self.work.steps, epochs=self.epochs, callbacks=[windows])

    def time_loop(self, train: Callable[[Any], Any], data: Callable[[int], Any]) -> None:
        """Time a plain loop `train(data)`, where `data(steps)` returns the data for this many steps."""
        train(data(1))
        self.first_step()
        if self.windows:
            prepared = data(self.work.steps)
            self.lap()
            for _ in range(self.epochs):
                train(prepared)
                self.lap()


def write_result(figures: dict[str, Any]) -> None:
    """Write the figures of a job to the file BENCH_RESULT; without it, print them."""
    text = json.dumps(figures)
    path = os.environ.get("BENCH_RESULT")
    if path is None:
        print(text, flush=True)
    else:
        whole = Path(path + ".part")
        whole.write_text(text)
        whole.replace(path)  # a reader that waits for the file never sees a part of it


def arguments(add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """Parse the arguments of a timed script: `work` (a `Work`), `windows`, and those that `add` adds."""
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
    """Process of a peer in the job that `benchmarks.job` started.

    Attributes:
        ports: Free TCP ports of the loopback interface, one per rank; the same list on every rank.
    """

    rank: int
    world_size: int
    ports: tuple[int, ...]

    @classmethod
    def from_environment(cls) -> Place:
        ports = tuple(int(port) for port in os.environ["BENCH_PORTS"].split(","))
        return cls(int(os.environ["BENCH_RANK"]), int(os.environ["BENCH_WORLD_SIZE"]), ports)

    def share(self, samples: Any) -> Any:
        """Return this rank's samples: an equal part of every global batch."""
        return samples[self.rank :: self.world_size].copy()
