"""A program for jobs that are disturbed: `python -m tests.coordinator.program FOLDER KIND`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import keras

import phalanx
from phalanx.coordinator import ClusterCoordinator
from tests.coordinator.serving import serve_if_asked

FUNCTIONS = 6
BOUND_S = 200.0


def until(condition, what: str) -> None:
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def main() -> None:
    serve_if_asked()
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    strategy = phalanx.ParameterServerStrategy()
    with strategy.scope():
        counter = keras.metrics.Sum()
    coordinator = ClusterCoordinator(strategy)

    def function(number: int, name: tuple[int, int]) -> tuple[int, int, tuple[int, int]]:
        """Counts, says that it runs, and waits until it may go on."""
        counter.update_state([1.0])
        (folder / f"running-{number}-{os.getpid()}").touch()
        until((folder / "go").exists, "the function was not released")
        return number, os.getpid(), name

    def make(context: phalanx.InputContext) -> tuple[int, int]:
        return context.input_pipeline_id, os.getpid()

    names = coordinator.create_per_worker_values(make)
    if kind == "endless":
        coordinator.schedule(lambda: (folder / "sleeps").touch() or time.sleep(BOUND_S))
        coordinator.join()
    values = [coordinator.schedule(function, args=(number, names)) for number in range(FUNCTIONS)]
    coordinator.join()
    found = coordinator.fetch(values)
    assert [number for number, _, _ in found] == list(range(FUNCTIONS))
    assert all(name[1] == pid for _, pid, name in found), "a worker's value is of its own process"
    assert float(counter.result()) == FUNCTIONS, float(counter.result())
    (folder / "joining").write_text(" ".join(str(pid) for _, pid, _ in found))
    (folder / "joining").rename(folder / "joined")  # a reader that sees it can read it
    if kind == "comes back":
        until((folder / "started again").exists, "the worker was not restarted")
        again = int((folder / "started again").read_text())
        seen: set[int] = set()
        end = time.monotonic() + BOUND_S
        while again not in seen:
            assert time.monotonic() < end, f"{again} is not used, only {seen}"
            seen |= {
                pid
                for _, pid, _ in coordinator.fetch(
                    [coordinator.schedule(function, args=(number, names)) for number in range(FUNCTIONS)]
                )
            }
        (folder / "came back").touch()


if __name__ == "__main__":
    main()
