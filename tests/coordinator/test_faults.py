"""What goes wrong while functions run on workers, by really causing it; and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import phalanx
from phalanx.cluster.spec import ClusterSpec
from phalanx.cluster.task_comparison import JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.job_config import JobConfig
from phalanx.coordinator import ClusterCoordinator
from phalanx.errors import ConfigurationError, PeerLostError, RendezvousError
from phalanx.parameter_server.server_messages import UpdateRules
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from tests.coordinator import counting
from tests.coordinator.program import FUNCTIONS
from tests.coordinator.serving import SERVERS
from tests.parameter_server.tasks import Tasks
from tests.support.backends import FIRST

pytestmark = pytest.mark.timeout(600)

Start = Callable[..., Tasks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def of(kind: str, *, workers: int = 2, **settings: str) -> Tasks:
            program = ["-m", "tests.coordinator.program", str(tmp_path), kind]
            tasks = Tasks(tmp_path, program, servers=1, workers=workers, backend=FIRST, settings=settings, chief=True)
            return stack.enter_context(tasks)

        yield of


def running(tasks: Tasks) -> dict[int, list[int]]:
    """The functions that were begun, by the process that did."""
    found: dict[int, list[int]] = {}
    for path in tasks.folder.glob("running-*"):
        _, number, pid = path.name.split("-")
        found.setdefault(int(pid), []).append(int(number))
    return found


def pid_of(tasks: Tasks, name: str) -> int:
    return tasks.processes[name].pid


@pytest.mark.parametrize("settings", [SERVERS, pytest.param({}, marks=pytest.mark.slow)], ids=["servers", "programs"])
def test_a_killed_workers_function_runs_elsewhere_and_the_worker_comes_back(
    start: Start, settings: dict[str, str]
) -> None:
    tasks = start("comes back", **settings)
    tasks.wait_for(lambda: len(running(tasks)) == 2, "both workers run a function")
    killed = pid_of(tasks, "worker/1")
    begun = running(tasks)[killed]
    tasks.send("worker/1", signal.SIGKILL)
    tasks.processes["worker/1"].wait()
    (tasks.folder / "go").touch()
    tasks.wait_for((tasks.folder / "joined").exists, "the chief goes on")
    assert (tasks.folder / "joined").read_text().split() == [str(pid_of(tasks, "worker/0"))] * FUNCTIONS
    assert set(begun) <= set(running(tasks)[pid_of(tasks, "worker/0")]), "what was begun ran again"
    assert "Lost worker/1" in tasks.said("chief/0")
    tasks.restart("worker/1")
    (tasks.folder / "starting again").write_text(str(pid_of(tasks, "worker/1")))
    (tasks.folder / "starting again").rename(tasks.folder / "started again")
    assert set(tasks.ends().values()) == {0}
    assert (tasks.folder / "came back").exists()


@pytest.mark.slow
def test_a_late_worker_runs_too_and_what_is_saved_on_the_way_is_of_one_moment(tmp_path: Path) -> None:
    program = ["-m", "tests.coordinator.counting", str(tmp_path)]
    with Tasks(tmp_path, program, servers=2, workers=2, backend=FIRST, chief=True) as tasks:
        assert set(tasks.ends().values()) == {0}, tasks.everything()
    *looks, last = json.loads((tmp_path / "looks").read_text())
    for path in [*looks, last]:
        keras.utils.clear_session()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(), "mse")
        model.load_weights(path)
        iterations = int(model.optimizer.iterations)
        assert iterations > (0 if path != last else counting.FUNCTIONS - 1)
        assert {float(x) for weight in model.get_weights() for x in weight.flat} == {float(iterations)}, path


COUNTING = """
import sys, time
from pathlib import Path
import keras, numpy as np
import phalanx

folder = Path(sys.argv[1])
strategy = phalanx.ParameterServerStrategy(snapshot_dir=folder / "snapshots", snapshot_seconds=0.1)
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros")])
    optimizer = keras.optimizers.SGD(1.0)
coordinator = phalanx.coordinator.ClusterCoordinator(strategy)

def update():
    optimizer.apply([keras.ops.ones((2, 3))], model.trainable_variables)

for _ in range(10):
    coordinator.schedule(update)
coordinator.join()
(folder / "half").touch()
while not (folder / "go").exists():
    time.sleep(0.02)
for _ in range(10):
    coordinator.schedule(update)
coordinator.join()
np.save(folder / "kernel.npy", model.get_weights()[0])
"""


@pytest.mark.slow
def test_a_killed_server_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(COUNTING)
    program = [str(tmp_path / "program.py"), str(tmp_path)]
    with Tasks(tmp_path, program, servers=1, workers=2, backend=FIRST, chief=True) as tasks:
        tasks.wait_for((tmp_path / "half").exists, "the first functions have run")
        tasks.send("ps/0", signal.SIGKILL)
        tasks.processes["ps/0"].wait()
        tasks.restart("ps/0")
        (tmp_path / "go").touch()
        assert set(tasks.ends().values()) == {0}, tasks.everything()
        said = tasks.said("ps/0")
    assert "ps/0 resumes from its snapshot" in said
    lost = int(re.findall(r"ps/0: (\d+) updates of its variables are lost", said)[-1])
    np.testing.assert_array_equal(np.load(tmp_path / "kernel.npy"), lost - 20.0)


CUT_OFF = """
import sys
from pathlib import Path
import keras
import phalanx

folder = Path(sys.argv[1])
strategy = phalanx.ParameterServerStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros")])
    optimizer = keras.optimizers.SGD(1.0)
coordinator = phalanx.coordinator.ClusterCoordinator(strategy)

def update(goes_on):
    import gc, time
    from pathlib import Path
    import keras
    from phalanx.transport.link import Link
    worker = phalanx.coordinator.experimental_get_current_worker_index()
    (folder / f"ran-{worker}").touch()
    if worker == 1:
        [link.close() for link in gc.get_objects() if isinstance(link, Link) and link.peer == "ps/0"]
    while not (folder / goes_on).exists():
        time.sleep(0.02)
    optimizer.apply([keras.ops.ones((2, 3))], model.trainable_variables)
    return worker

results = [coordinator.schedule(update, ("ran-1",)) for _ in range(10)]
coordinator.join()
(folder / "result").write_text(repr([int(result.fetch()) for result in results]))
"""


@pytest.mark.slow
def test_a_worker_that_alone_does_not_reach_a_server_ends_and_its_function_runs_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CUT_OFF)
    program = [str(tmp_path / "program.py"), str(tmp_path)]
    with Tasks(tmp_path, program, servers=1, workers=2, backend=FIRST, chief=True) as tasks:
        ends = tasks.ends()
        said = tasks.said("chief/0")
    assert ends == {"chief/0": 0, "worker/0": 0, "worker/1": PeerLostError.exit_code, "ps/0": 0}, said
    assert (tmp_path / "result").read_text() == repr([0] * 10)
    assert "Lost worker/1: it does not reach ps/0, which answers here." in said


@pytest.mark.slow
def test_without_a_worker_left_the_chief_ends_with_their_names(start: Start) -> None:
    tasks = start("", PHALANX_TIMEOUT="3")
    tasks.wait_for(lambda: len(running(tasks)) == 2, "both workers run a function")
    for name in ("worker/0", "worker/1"):
        tasks.send(name, signal.SIGKILL)
    assert tasks.ends("chief/0") == {"chief/0": PeerLostError.exit_code}
    assert "No worker is left to run functions: worker/0, worker/1 are lost" in tasks.said("chief/0")


@pytest.mark.slow
def test_if_no_worker_comes_the_chief_ends_with_their_names(start: Start) -> None:
    tasks = start("", PHALANX_TIMEOUT="3", PHALANX_RENDEZVOUS_TIMEOUT="10")
    for name in ("worker/0", "worker/1"):
        tasks.send(name, signal.SIGKILL)
    assert tasks.ends("chief/0") == {"chief/0": RendezvousError.exit_code}
    assert "No worker connected to run functions within 10 s: worker/0, worker/1 are missing" in tasks.said("chief/0")


@pytest.mark.slow
def test_an_interrupted_chief_ends_all_tasks(start: Start) -> None:
    tasks = start("endless")
    tasks.wait_for((tasks.folder / "sleeps").exists, "a function runs")
    tasks.send("chief/0", signal.SIGINT)
    codes = tasks.ends()
    assert codes.pop("chief/0") == -signal.SIGINT
    assert codes.pop("ps/0") == PeerLostError.exit_code
    assert "chief/0 failed with an error: KeyboardInterrupt" in tasks.said("ps/0")
    assert set(codes.values()) == {0}
    assert "KeyboardInterrupt" in tasks.said("chief/0")


@pytest.mark.slow
def test_a_stopped_worker_is_left_out_and_may_go_on(start: Start) -> None:
    tasks = start("comes back", PHALANX_TIMEOUT="5")
    tasks.wait_for(lambda: len(running(tasks)) == 2, "both workers run a function")
    tasks.send("worker/1", signal.SIGSTOP)
    (tasks.folder / "go").touch()
    tasks.wait_for((tasks.folder / "joined").exists, "the chief goes on")
    tasks.send("worker/1", signal.SIGCONT)
    (tasks.folder / "starting again").write_text(str(pid_of(tasks, "worker/1")))
    (tasks.folder / "starting again").rename(tasks.folder / "started again")
    assert set(tasks.ends().values()) == {0}


@pytest.mark.slow
def test_workers_wait_for_a_chief_that_is_started_again(start: Start) -> None:
    tasks = start("")
    tasks.wait_for(lambda: len(running(tasks)) == 2, "both workers run a function")
    tasks.send("chief/0", signal.SIGKILL)
    tasks.processes["chief/0"].wait()
    (tasks.folder / "go").touch()
    tasks.restart("chief/0")
    assert set(tasks.ends().values()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_of_a_chief_that_does_not_come_back_end_with_its_name(start: Start, number: signal.Signals) -> None:
    tasks = start("", PHALANX_TIMEOUT="3")
    tasks.wait_for(lambda: len(running(tasks)) == 2, "both workers run a function")
    tasks.send("chief/0", number)
    (tasks.folder / "go").touch()
    assert set(tasks.ends("worker/0", "worker/1").values()) == {PeerLostError.exit_code}
    assert "lost chief/0" in tasks.said("worker/0")


@pytest.mark.slow
def test_a_chief_that_was_stopped_for_a_while_goes_on_with_its_workers(start: Start) -> None:
    tasks = start("", PHALANX_TIMEOUT="20")
    tasks.wait_for(lambda: len(running(tasks)) == 2, "both workers run a function")
    tasks.send("chief/0", signal.SIGSTOP)
    (tasks.folder / "go").touch()
    tasks.wait_for(lambda: "Waiting for it to return" in tasks.said("worker/0"), "a worker notices it")
    tasks.send("chief/0", signal.SIGCONT)
    assert set(tasks.ends().values()) == {0}


# Strategies that can have no coordinator.


def strategy_of(
    cluster: dict[str, list[str]], *, secret: bytes | None = b"0123456789abcdef", **rules: Any
) -> phalanx.ParameterServerStrategy:
    """As much of a strategy as the coordinator looks at first, without a job."""
    spec = ClusterSpec(cluster)
    me = TaskIdentity(spec, spec.chief, JobFacts(), JobConfig(secret=secret))
    client: Any = SimpleNamespace(identity=me)
    all_rules = UpdateRules(
        **{"synchronous": False, "replicas_to_aggregate": 0, "staleness": -1, "refuse_nan": True, "timeout_s": 1.0}
        | rules
    )
    strategy = object.__new__(phalanx.ParameterServerStrategy)
    strategy._worker = ParameterServerWorker(client, 0, len(me.tasks), all_rules, None, None, "")
    return strategy


TWO = {"ps": ["localhost:1"], "worker": ["localhost:2", "localhost:3"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": TWO, "secret": None}, r"sends code .* set PHALANX_SECRET .* `phalanx run`"),
        (
            {"cluster": {**TWO, "worker": ["localhost:2"]}},
            r"worker/0 coordinates and computes nothing, .* no other worker",
        ),
        ({"cluster": TWO, "synchronous": True}, "trains asynchronously"),
        ({"cluster": TWO, "staleness": 1}, "trains asynchronously"),
    ],
)
def test_what_can_have_no_coordinator_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ClusterCoordinator(strategy_of(**options))


def test_other_strategies_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="for a ParameterServerStrategy; it got <OneDeviceStrategy"):
        ClusterCoordinator(phalanx.OneDeviceStrategy())  # type: ignore[arg-type]
