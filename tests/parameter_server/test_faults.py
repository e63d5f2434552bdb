"""What goes wrong among parameter servers, by really causing it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.errors import (
    CollectiveTimeoutError,
    ConfigurationError,
    DisagreementError,
    EvictedError,
    PeerLostError,
    UnsupportedError,
)
from tests.parameter_server.tasks import BOUND_S, Tasks
from tests.support.backends import FIRST

pytestmark = pytest.mark.timeout(600)

BATCHES = 64
Start = Callable[..., Tasks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def of(
            kind: str,
            epochs: int = 8,
            *,
            servers: int = 1,
            workers: int = 2,
            timeout_s: float = 60,
            settings: dict[str, str] | None = None,
        ) -> Tasks:
            program = ["-m", "tests.parameter_server.program", str(tmp_path), kind, str(epochs)]
            all_settings = {"PHALANX_TIMEOUT": str(timeout_s), **(settings or {})}
            tasks = Tasks(tmp_path, program, servers=servers, workers=workers, backend=FIRST, settings=all_settings)
            return stack.enter_context(tasks)

        yield of


def trains(tasks: Tasks, worker: int = 0) -> None:
    """Wait until a worker has finished an epoch."""
    tasks.wait_for((tasks.folder / f"{worker}.epoch").exists, f"worker {worker} trains")


def steps(tasks: Tasks, worker: int = 0) -> tuple[int, bool]:
    """The global step with which a worker has ended, and whether its weights are finite."""
    step, finite = (tasks.folder / f"{worker}.end").read_text().split()
    return int(step), finite == "True"


def made_enough(tasks: Tasks, *names: str) -> int:
    """Let these tasks end with the present epoch or the next; the number of epochs made, each of whose batches was
    trained once."""
    epochs = ends_soon(tasks, *names)
    assert steps(tasks) == (epochs * BATCHES, True)
    return epochs


def ends_soon(tasks: Tasks, *names: str) -> int:
    """Let these tasks end with the present epoch or the next; the number of epochs made."""
    (tasks.folder / "enough").touch()
    assert set(tasks.ends(*names).values()) == {0}, tasks.everything()
    return int((tasks.folder / "0.epoch").read_text()) + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_a_killed_worker_costs_no_step(start: Start, kind: str) -> None:
    tasks = start(kind, workers=3)
    trains(tasks)
    tasks.send("worker/2", signal.SIGKILL)
    assert tasks.ends("worker/0", "worker/1", "ps/0") == {"worker/0": 0, "worker/1": 0, "ps/0": 0}
    assert steps(tasks) == (8 * BATCHES, True)


@pytest.mark.slow
def test_a_worker_that_comes_back_takes_part(start: Start) -> None:
    tasks = start("asynchronous", epochs=10_000, workers=2)
    trains(tasks)
    tasks.send("worker/1", signal.SIGKILL)
    tasks.processes["worker/1"].wait()
    (tasks.folder / "1.epoch").unlink(missing_ok=True)
    tasks.restart("worker/1")
    trains(tasks, worker=1)
    tasks.send("worker/0", signal.SIGTERM)


def test_a_killed_server_ends_the_workers_with_its_name(start: Start) -> None:
    tasks = start("asynchronous", epochs=10_000, servers=2)
    for worker in range(2):
        trains(tasks, worker)
    tasks.send("ps/1", signal.SIGKILL)
    assert set(tasks.ends("worker/0", "worker/1", "ps/0").values()) == {PeerLostError.exit_code}
    assert "PeerLostError: lost ps/1" in tasks.said("worker/0")
    assert "worker/0 failed with an error: PeerLostError: lost ps/1" in tasks.said("ps/0")


@pytest.mark.slow
def test_a_killed_chief_ends_the_others_with_its_name(start: Start) -> None:
    tasks = start("asynchronous", epochs=10_000, timeout_s=10)
    trains(tasks)
    tasks.send("worker/0", signal.SIGKILL)
    assert tasks.ends("worker/1") == {"worker/1": PeerLostError.exit_code}
    assert "lost worker/0" in tasks.said("worker/1")


@pytest.mark.slow
def test_a_chief_that_is_killed_while_it_validates_ends_the_others_with_its_name(start: Start) -> None:
    tasks = start("validates", epochs=10_000, timeout_s=10)
    tasks.wait_for((tasks.folder / "validates").exists, "the chief validates")
    tasks.send("worker/0", signal.SIGKILL)
    assert tasks.ends("worker/1") == {"worker/1": PeerLostError.exit_code}
    assert "lost worker/0" in tasks.said("worker/1")


def test_strangers_a_killed_and_a_stopped_worker_cost_no_step(start: Start) -> None:
    tasks = start("synchronous", epochs=10_000, timeout_s=15, workers=3)
    trains(tasks)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), b"PXF\x01\xff\xff\xff\xff\xff\xff\xff\xff"):
        with socket.create_connection(tasks.address("ps/0")) as stranger:
            stranger.sendall(garbage)
    tasks.wait_for(lambda: "refused a connection" in tasks.said("ps/0"), "they are refused")
    tasks.send("worker/2", signal.SIGKILL)
    tasks.processes["worker/2"].wait()
    tasks.send("worker/1", signal.SIGSTOP)
    tasks.wait_for(lambda: "worker/1 makes no progress" in tasks.said("ps/0"), "it is noticed")
    assert made_enough(tasks, "worker/0", "ps/0")


@pytest.mark.slow
def test_a_stopped_server_ends_the_job(start: Start) -> None:
    tasks = start("asynchronous", epochs=10_000, timeout_s=5)
    trains(tasks)
    tasks.send("ps/0", signal.SIGSTOP)
    assert set(tasks.ends("worker/0", "worker/1").values()) == {CollectiveTimeoutError.exit_code}
    assert "ps/0 sent nothing before the deadline" in tasks.said("worker/0")


@pytest.mark.slow
def test_another_model_on_one_worker_is_named(start: Start) -> None:
    tasks = start("other model")
    assert tasks.ends("worker/1") == {"worker/1": DisagreementError.exit_code}
    assert "variable 0 is" in tasks.said("worker/1")
    assert "[8, 8] on the chief and" in tasks.said("worker/1")
    assert "[8, 9] on this task" in tasks.said("worker/1")


@pytest.mark.slow
def test_other_metrics_on_one_worker_are_named(start: Start) -> None:
    tasks = start("other metrics")
    assert set(tasks.ends("worker/0", "worker/1").values()) == {DisagreementError.exit_code}
    for worker in ("worker/0", "worker/1"):
        assert "worker/1 merges" in tasks.said(worker) or "worker/0 merges" in tasks.said(worker)
        assert "must be the same on all workers" in tasks.said(worker)


def test_other_data_on_one_worker_are_named(start: Start) -> None:
    tasks = start("other data")
    assert tasks.ends("worker/1") == {"worker/1": DisagreementError.exit_code}
    assert "the values of this worker are not those of the chief" in tasks.said("worker/1")


@pytest.mark.slow
def test_updates_that_are_not_finite_are_left_out_and_counted(start: Start) -> None:
    tasks = start("not finite", epochs=3)
    assert set(tasks.ends().values()) == {0}
    assert steps(tasks)[1], "the weights are finite"
    assert "was not finite and has not been applied (3 so far)" in tasks.said("ps/0")


@pytest.mark.slow
def test_updates_that_are_not_finite_go_through_where_that_was_chosen(start: Start) -> None:
    tasks = start("let through", epochs=2)
    assert set(tasks.ends().values()) == {0}
    assert steps(tasks) == (2 * BATCHES, False)
    assert "not finite" not in tasks.said("ps/0")


@pytest.mark.slow
def test_a_stopped_worker_holds_nobody_back_for_ever(start: Start) -> None:
    tasks = start("bounded", epochs=10_000, timeout_s=15, workers=3)
    trains(tasks)
    tasks.send("worker/1", signal.SIGSTOP)
    tasks.wait_for(lambda: "worker/1 makes no progress" in tasks.said("ps/0"), "it is noticed")
    assert made_enough(tasks, "worker/0", "worker/2", "ps/0")
    tasks.send("worker/1", signal.SIGCONT)
    assert tasks.ends("worker/1")["worker/1"] != 0


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, True])
def test_all_servers_continue_without_a_stopped_worker(start: Start, goes_on: bool) -> None:
    """Only the first one notices that it has stopped. The others neither apply what it sends when it goes on, nor wait
    for its goodbye."""
    tasks = start("stops with a ticket", epochs=10_000, timeout_s=8, servers=2)
    tasks.wait_for(lambda: "worker/1 makes no progress" in tasks.said("ps/0"), "it is noticed")
    if goes_on:
        tasks.send("worker/1", signal.SIGCONT)
        assert tasks.ends("worker/1") == {"worker/1": EvictedError.exit_code}
    assert made_enough(tasks, "worker/0", "ps/0", "ps/1")


@pytest.mark.slow
def test_a_worker_that_was_left_out_may_be_replaced_while_it_still_stands(start: Start) -> None:
    tasks = start("bounded", epochs=10_000, timeout_s=8)
    trains(tasks, worker=1)
    stopped = tasks.processes["worker/1"]
    try:
        tasks.send("worker/1", signal.SIGSTOP)
        tasks.wait_for(lambda: "worker/1 makes no progress" in tasks.said("ps/0"), "it is noticed")
        (tasks.folder / "1.epoch").unlink(missing_ok=True)
        tasks.restart("worker/1")
        trains(tasks, worker=1)
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(BOUND_S) == EvictedError.exit_code
        assert made_enough(tasks, "worker/0", "worker/1", "ps/0")
    finally:
        stopped.kill()
        stopped.wait()


@pytest.mark.slow
def test_a_worker_that_was_left_out_says_so_when_it_goes_on(start: Start) -> None:
    tasks = start("synchronous", epochs=100_000, timeout_s=8, workers=3)
    trains(tasks)
    tasks.send("worker/1", signal.SIGSTOP)
    tasks.wait_for(lambda: "worker/1 makes no progress" in tasks.said("ps/0"), "the server leaves it out")
    tasks.send("worker/1", signal.SIGCONT)
    assert tasks.ends("worker/1") == {"worker/1": EvictedError.exit_code}
    assert "was evicted" in tasks.said("worker/1")
    tasks.send("worker/0", signal.SIGTERM)


@pytest.mark.slow
def test_a_variable_created_after_the_first_step_is_refused(start: Start) -> None:
    tasks = start("grows", epochs=3)
    assert UnsupportedError.exit_code in tasks.ends("worker/0", "worker/1").values()
    assert "trainable variables now, and had" in tasks.said("worker/0") + tasks.said("worker/1")


@pytest.mark.slow
def test_a_server_is_started_explicitly(start: Start) -> None:
    tasks = start("explicit server", epochs=2)
    assert set(tasks.ends().values()) == {0}
    assert steps(tasks) == (2 * BATCHES, True)


@pytest.mark.slow
def test_servers_without_a_variable_have_nothing_to_do(start: Start) -> None:
    tasks = start("synchronous", epochs=2, servers=6)
    assert set(tasks.ends().values()) == {0}
    assert steps(tasks) == (2 * BATCHES, True)


# Arguments and clusters that are wrong.


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"worker": ["localhost:1", "localhost:2"], "ps": ["localhost:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": spec, "task": {"type": "worker", "index": 0}}))


def test_a_cluster_without_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"worker": ["localhost:1", "localhost:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": spec, "task": {"type": "worker", "index": 0}}))
    with pytest.raises(ConfigurationError, match=r"has no parameter server .*phalanx run --ps 1"):
        phalanx.ParameterServerStrategy()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas_to_aggregate": 1}, "pass synchronous=True as well"),
        ({"replicas_to_aggregate": 3, "synchronous": True}, "must be from 1 to 2"),
        ({"staleness": -1}, "staleness=-1 is no number of steps"),
        ({"staleness": 1, "synchronous": True}, "staleness=1 is no number"),
        ({"overlap": True, "synchronous": True}, "Leave out overlap or synchronous"),
        ({"compression": "int8"}, "compression is 'int8'; gradients go to parameter servers in their own dtype or as"),
        ({"embedding_rows": "yes"}, "embedding_rows is 'yes'; write True, False or 'auto'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(cluster: None, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        phalanx.ParameterServerStrategy(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda k: k.LossScaleOptimizer(k.SGD()), {}, "scales the loss"),
        (lambda k: k.Adafactor(), {}, "Adafactor does not record"),
        (lambda k: k.SGD(lambda: 0.1), {}, "a function as its learning rate"),
        (lambda k: k.Lamb(), {"is_sharded": True, "is_on_one_server": False}, "computes with each variable as a whole"),
        (
            lambda k: k.SGD(global_clipnorm=1.0),
            {"is_on_one_server": False, "is_partial": True},
            "the norm of the first gradients",
        ),
        (
            lambda k: k.SGD(clipnorm=1.0, gradient_accumulation_steps=2),
            {"is_on_one_server": False},
            "the norm of accumulated gradients",
        ),
    ],
)
def test_optimizers_that_servers_cannot_run_are_refused(
    make: Callable[[object], object], options: dict[str, bool], message: str
) -> None:
    import keras

    from phalanx.engines.updater import check_optimizer

    with pytest.raises(UnsupportedError, match=message):
        check_optimizer(make(keras.optimizers), **{"is_sharded": False, "is_on_one_server": True} | options)


def test_a_model_without_trainable_weights_is_refused() -> None:
    from phalanx.training.servers.remote_variables import RemoteVariables

    unused: Any = None
    with pytest.raises(UnsupportedError, match="no trainable weights"):
        RemoteVariables(unused, unused, unused, [])


def test_an_optimizer_of_unknown_classes_is_refused_with_the_rule() -> None:
    from phalanx.engines import make_updater

    described = '{"module": "mine", "class_name": "Odd", "config": {}, "registered_name": "mine>Odd"}'
    with pytest.raises(ConfigurationError, match=r"'Odd'.*before you create the strategy"):
        make_updater(described, [])


def test_updates_that_were_lost_count_for_schedules() -> None:
    import keras
    import numpy as np

    from phalanx.engines import make_updater
    from phalanx.engines.updater import UpdaterPiece
    from phalanx.keras_compat.copies.object_config import config_json_of

    decay = keras.optimizers.schedules.ExponentialDecay(1.0, 10, 0.5, staircase=True)
    updater = make_updater(
        config_json_of(keras.optimizers.SGD(decay)), [UpdaterPiece("w", np.zeros(1, "float32"), None, True)]
    )
    updater.count(10)
    updater.apply([np.ones(1, "float32")])
    np.testing.assert_allclose(updater.values()[0], [-0.5])


@pytest.mark.slow
def test_layers_that_set_their_own_weights_are_refused(start: Start) -> None:
    tasks = start("spectral")
    assert set(tasks.ends("worker/0", "worker/1").values()) == {UnsupportedError.exit_code}
    assert "sets its own weights when it is called" in tasks.said("worker/0")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["synchronized", "first"])
def test_normalization_over_all_batches_is_refused_where_workers_do_not_wait_for_all(start: Start, kind: str) -> None:
    tasks = start(kind)
    assert set(tasks.ends("worker/0", "worker/1").values()) == {UnsupportedError.exit_code}
    assert "is a BatchNormalization(synchronized=True)" in tasks.said("worker/0")


@pytest.mark.slow
def test_normalization_that_is_frozen_meets_nobody(start: Start) -> None:
    tasks = start("synchronized and frozen", epochs=1)
    assert set(tasks.ends("worker/0", "worker/1").values()) == {0}, tasks.everything()


def test_a_worker_that_comes_after_the_last_batch_has_no_history(start: Start) -> None:
    """Its callbacks would take a loss of 0, or NaN, for one of the training."""
    tasks = start("late worker", epochs=2)
    tasks.wait_for((tasks.folder / "waits").exists, "worker/1 is about to train")
    tasks.wait_for((tasks.folder / "0.end").exists, "worker/0 has trained")
    (tasks.folder / "go").touch()
    assert set(tasks.ends("worker/0", "worker/1").values()) == {0}, tasks.everything()
    assert json.loads((tasks.folder / "1.history").read_text()) == {"epoch": []}
    assert not (tasks.folder / "1.epoch").exists()
    assert "worker/1 trained no batch of this fit(), and has no history: the others had taken" in tasks.said("worker/1")
    assert json.loads((tasks.folder / "0.history").read_text())["epoch"] == [0, 1]
    assert steps(tasks) == (2 * BATCHES, True)


@pytest.mark.slow
def test_a_chief_without_a_part_in_the_last_steps_knows_how_many_there_are(start: Start) -> None:
    tasks = start("late chief", epochs=2)
    assert set(tasks.ends("worker/0", "worker/1").values()) == {0}, tasks.everything()
    assert steps(tasks) == (2 * BATCHES, True)
    assert steps(tasks, 1) == (2 * BATCHES, True)


def test_what_a_description_leaves_out_and_names_that_are_given_twice() -> None:
    import keras
    import numpy as np

    from phalanx.keras_compat.variables.optimizer_slots import OptimizerSlot, slots_of_model

    class Odd(keras.optimizers.SGD):
        def __init__(self, boost: float = 1.0, **options: object) -> None:
            super().__init__(**options)
            self.boost = boost

        def build(self, variables: list[object]) -> None:
            super().build(variables)
            for _ in range(2):
                for variable in variables:
                    self.add_variable_from_reference(variable, "moment")

    weight = keras.Variable(np.zeros(2, "float32"))
    optimizer = Odd()
    optimizer.build([weight])
    assert {OptimizerSlot(0, "moment"), OptimizerSlot(0, "moment#2")} <= set(slots_of_model(optimizer, [weight]))
    optimizer.boost = 5.0
    with pytest.raises(UnsupportedError, match="leaves out `boost`"):
        slots_of_model(optimizer, [weight])


def test_optimizers_that_servers_could_not_create_are_refused_with_the_rule() -> None:
    import keras
    import numpy as np

    from phalanx.keras_compat.variables.optimizer_slots import check_methods, slots_of_model

    class Bare(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: object) -> object:
            return 0.1

    class Unregistered(Bare):
        def get_config(self) -> dict[str, object]:
            return {}

    weight = keras.Variable(np.zeros(2, "float32"))
    for rate in (Bare(), Unregistered()):
        optimizer = keras.optimizers.SGD(rate)
        optimizer.build([weight])
        with pytest.raises(UnsupportedError, match="register_keras_serializable"):
            slots_of_model(optimizer, [weight])
    optimizer = keras.optimizers.SGD()
    check_methods(optimizer)
    optimizer.update_step = lambda *arguments: None
    with pytest.raises(UnsupportedError, match="has replaced update_step"):
        check_methods(optimizer)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("momentum", "The optimizer's momentum was changed during fit()"),
        pytest.param("schedule", "The optimizer's learning_rate was changed during fit()", marks=pytest.mark.slow),
        pytest.param("momentum in an epoch", "The optimizer's momentum was changed", marks=pytest.mark.slow),
        pytest.param("frozen", "no trainable weights", marks=pytest.mark.slow),
    ],
)
def test_what_servers_would_not_hear_of_is_refused(start: Start, kind: str, message: str) -> None:
    tasks = start(kind, workers=1)
    assert tasks.ends("worker/0") == {"worker/0": UnsupportedError.exit_code}, tasks.everything()
    assert message in tasks.said("worker/0")
