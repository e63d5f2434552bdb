"""The cost of an open dashboard for a training step: `python -m benchmarks.dashboard_cost`.

One job of two workers trains an MLP at global batch 64 on JAX. Windows of a few seconds alternate: with a dashboard and
a reader of its stream, like an open page, and without. Each pair of adjacent windows gives a ratio of mean step times;
the result is the median ratio. On a machine with other load, this ratio says little. The processor time of dashboard
and launcher, which is lost for workers on all cores, is a bound that does not depend on other load.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

TOKEN = "benchmark-of-the-dashboard"
WARM_UP_S = 2.0
"""A starting dashboard imports its packages, which is not part of the measurement."""

PROGRAM = """
import sys, time
import keras, numpy as np
import phalanx
out, seconds = sys.argv[1], float(sys.argv[2])
strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
rng = np.random.default_rng(0)
x, y = rng.normal(size=(4096, 784)).astype("float32"), rng.integers(0, 10, 4096)

class Times(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.times = []
    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.time())
        if self.times[-1] - self.times[0] > seconds:
            self.model.stop_training = True

times = Times()
model.fit(x, y, batch_size=64, epochs=100_000, verbose=0, callbacks=[times])
if strategy.cluster_resolver.task_id == 0:
    np.save(out, times.times)
"""


@contextlib.contextmanager
def open_dashboard(environment: dict[str, str]) -> Iterator[int]:
    """Context manager that runs a dashboard with an open page, and yields the ID of the dashboard's process."""
    command = [sys.executable, "-m", "phalanx", "dashboard", "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as dashboard:
        assert dashboard.stdout is not None
        link = dashboard.stdout.readline().split("http://")[1].split()[0]
        address, _, token = link.partition("/?token=")
        request = urllib.request.Request(f"http://{address}/events", headers={"Authorization": f"Bearer {token}"})
        headers = dict(request.header_items())
        reader = f"import urllib.request as u\nr = u.Request({request.full_url!r}, headers={headers!r})\n"
        with subprocess.Popen([sys.executable, "-c", f"{reader}for line in u.urlopen(r): pass"]) as page:
            try:
                yield dashboard.pid
            finally:
                page.kill()
                dashboard.kill()


@dataclass
class Cost:
    """Results of the measurement.

    Attributes:
        ratios: Ratio of the step times with and without an open dashboard, for each pair of windows.
        step_s: Step time without a dashboard.
        dashboard, launcher, launcher_alone: Processor seconds per second of the dashboard, and of the launcher with and
            without it.
    """

    ratios: list[float]
    step_s: float
    dashboard: float
    launcher: float
    launcher_alone: float


def measure(pairs: int, window_s: float) -> Cost:
    """Run the job with windows of both kinds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.npy"
        environment = {**os.environ, "KERAS_BACKEND": "jax", "PHALANX_JOBS": folder, "PHALANX_DASHBOARD_TOKEN": TOKEN}
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM)
        seconds = 2 * pairs * (window_s + WARM_UP_S) + 15
        command = [sys.executable, "-m", "phalanx", "run", "--workers", "2", str(program), str(out), str(seconds)]
        windows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        used: dict[str, list[float]] = {"dashboard": [], "launcher": [], "launcher_alone": []}
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as job:
            _wait_for_steps(environment, job)
            for pair in range(pairs):
                for is_open in (pair % 2 == 0, pair % 2 != 0):
                    with open_dashboard(environment) if is_open else contextlib.nullcontext() as dashboard:
                        time.sleep(WARM_UP_S)
                        windows[is_open].append((time.time(), time.time() + window_s))
                        before = _processor_s(job.pid), _processor_s(dashboard)
                        time.sleep(window_s)
                        used["launcher" if is_open else "launcher_alone"].append(_processor_s(job.pid) - before[0])
                        used["dashboard"] += [_processor_s(dashboard) - before[1]] if is_open else []
            assert job.wait() == 0
        times = np.load(out)
    both = zip(windows[True], windows[False], strict=True)
    return Cost(
        [_mean_step(times, *with_it) / _mean_step(times, *without) for with_it, without in both],
        statistics.median(_mean_step(times, *each) for each in windows[False]),
        **{name: statistics.mean(seconds) / window_s for name, seconds in used.items()},
    )


def _processor_s(pid: int | None) -> float:
    if pid is None:
        return 0.0
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _wait_for_steps(environment: dict[str, str], job: subprocess.Popen[bytes]) -> None:
    status = [sys.executable, "-m", "phalanx", "status"]
    while job.poll() is None:
        done = subprocess.run(status, env=environment, capture_output=True, text=True, check=False)
        if "steps/s" in done.stdout:
            time.sleep(5)
            return
        time.sleep(1)


def _mean_step(times: np.ndarray, begin: float, end: float) -> float:
    inside = times[(times >= begin) & (times < end)]
    return float((inside[-1] - inside[0]) / (len(inside) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--window", type=float, default=4.0, help="seconds")
    arguments = parser.parse_args()
    cost = measure(arguments.pairs, arguments.window)
    low, middle, high = np.percentile(cost.ratios, [25, 50, 75])
    print(f"a step takes {cost.step_s * 1000:.2f} ms, and with an open page {middle:.4f} times as long")
    print(f"(half of the ratios lie between {low:.4f} and {high:.4f})")
    print(
        f"of one core, the dashboard takes {cost.dashboard:.2%}, the launcher {cost.launcher:.2%} (without a dashboard "
        f"{cost.launcher_alone:.2%}): of this machine's {os.cpu_count()} cores "
        f"{(cost.dashboard + cost.launcher - cost.launcher_alone) / (os.cpu_count() or 1):.2%} more"
    )


if __name__ == "__main__":
    main()
