"""TensorFlow 1 sessions with bounded waits: `Session`, `Supervisor`, `MonitoredTrainingSession`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from phalanx.config.environment_variables import RENDEZVOUS_TIMEOUT
from phalanx.config.job_config import JobConfig
from phalanx.errors import RendezvousError
from phalanx.tensorflow1.graph_server import server_of
from phalanx.tensorflow1.session_setup import add_device_filters, await_tasks, translate_lost_task_errors

v1 = tf.compat.v1

POLL_CHIEF_S = 1
"""Seconds between two checks for the chief's initialized variables. TensorFlow waits 30."""

STOP_GRACE_S = 10
"""Seconds for the threads of a session to stop. TensorFlow waits 120. On the chief, the thread of
`SyncReplicasOptimizer` never stops by itself: it waits for gradients of workers that have finished."""


class _BoundedSession:
    """Mixin before a TensorFlow session among the bases."""

    def __init__(self, target: str = "", graph: Any = None, config: Any = None):
        self._phalanx_target = target
        self._session = None  # TensorFlow's __del__ reads it, even if the next lines fail
        config = add_device_filters(target, config, graph or v1.get_default_graph())
        await_tasks(target, config)
        super().__init__(target, graph, config)  # type: ignore[call-arg]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """See TensorFlow.

        Raises: PeerLostError naming a parameter server that is lost.
        """
        with translate_lost_task_errors(self._phalanx_target):
            return super().run(*args, **kwargs)  # type: ignore[misc]


class Session(_BoundedSession, tf.compat.v1.Session):  # type: ignore[misc]
    """`tf.Session` of TensorFlow 1. On a server of the job, it first waits for the tasks on which the graph is placed.

    Args:
        target: Target of the server; empty for this process alone.
        graph: See TensorFlow.
        config: See TensorFlow; without `device_filters`, it gets filters for the graph's tasks.

    Raises: RendezvousError naming the tasks that do not start in time.
    """


class InteractiveSession(_BoundedSession, tf.compat.v1.InteractiveSession):  # type: ignore[misc]
    """`tf.InteractiveSession` of TensorFlow 1, with the arguments and bounded waits of `Session`."""


class Supervisor(tf.compat.v1.train.Supervisor):  # type: ignore[misc]
    """`tf.train.Supervisor` of TensorFlow 1, with the same arguments and methods.

    Waits for servers and for the chief are bounded by PHALANX_RENDEZVOUS_TIMEOUT and name the missing tasks. Workers
    check every second whether the chief is ready. `summary_computed` does nothing on workers that write no summaries.
    """

    def __init__(self, graph: Any = None, *args: Any, **kwargs: Any):
        kwargs.setdefault("recovery_wait_secs", POLL_CHIEF_S)
        self._trained_graph = graph or v1.get_default_graph()
        super().__init__(graph, *args, **kwargs)

    def prepare_or_wait_for_session(
        self,
        master: str = "",
        config: Any = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float | None = None,
        start_standard_services: bool = True,
    ) -> Any:
        """See TensorFlow. `max_wait_secs` limits the wait for the chief; None for PHALANX_RENDEZVOUS_TIMEOUT.

        Raises: RendezvousError naming the tasks that did not start in time.
        """
        config = add_device_filters(master, config, self._trained_graph)
        await_tasks(master, config)
        with translate_chief_timeout(max_wait_secs) as bound_s:
            return super().prepare_or_wait_for_session(
                master, config, wait_for_checkpoint, bound_s, start_standard_services
            )

    @contextlib.contextmanager
    def managed_session(self, master: str = "", *args: Any, **kwargs: Any) -> Iterator[Any]:
        """See TensorFlow.

        Raises: PeerLostError naming a parameter server that is lost.
        """
        with translate_lost_task_errors(master), super().managed_session(master, *args, **kwargs) as session:
            yield session

    def summary_computed(self, sess: Any, summary: Any, global_step: Any = None) -> None:
        """See TensorFlow; does nothing on workers other than the chief, which write no summaries."""
        if self.is_chief or self.summary_writer is not None:
            super().summary_computed(sess, summary, global_step)


@contextlib.contextmanager
def translate_chief_timeout(max_wait_s: float | None) -> Iterator[float]:
    """Yield how long to wait for the chief. Within the context, its absence raises RendezvousError."""
    bound_s = JobConfig.from_environment().rendezvous_timeout_s if max_wait_s is None else max_wait_s
    try:
        yield bound_s
    except tf.errors.DeadlineExceededError as error:
        raise RendezvousError(
            f"The chief did not initialize the variables within {bound_s:g} s ({RENDEZVOUS_TIMEOUT}, or "
            f"max_wait_secs). Is a task started with is_chief=True, and does it build the same graph?"
        ) from error


class ChiefSessionCreator(tf.compat.v1.train.ChiefSessionCreator):  # type: ignore[misc]
    """Creates the chief's session of a `tf.train.MonitoredSession`, with TensorFlow's arguments and bounded waits."""

    def create_session(self) -> Any:
        """Wait for the tasks, initialize or restore the variables, and return the session.

        Raises: RendezvousError or PeerLostError naming the missing tasks.
        """
        self._config: Any = add_device_filters(self._master, self._config, v1.get_default_graph())
        await_tasks(self._master, self._config)
        return super().create_session()


class WorkerSessionCreator(tf.compat.v1.train.SessionCreator):  # type: ignore[misc]
    """Creates the session of a worker that is not the chief, like TensorFlow's class.

    Args:
        scaffold: See TensorFlow.
        master: Target of the server.
        config: Configuration of the session, as for `Session`.
        max_wait_secs: Seconds to wait for the chief; None for PHALANX_RENDEZVOUS_TIMEOUT.
    """

    def __init__(self, scaffold: Any = None, master: str = "", config: Any = None, max_wait_secs: float | None = None):
        self._scaffold = scaffold or v1.train.Scaffold()
        self._master = master
        self._config = config
        self._max_wait_secs = max_wait_secs

    def create_session(self) -> Any:
        """Wait for the tasks and the chief, and return the session.

        Raises: RendezvousError or PeerLostError naming the missing tasks.
        """
        scaffold = self._scaffold
        config = add_device_filters(self._master, self._config, v1.get_default_graph())
        scaffold.finalize()
        await_tasks(self._master, config)
        manager = v1.train.SessionManager(
            local_init_op=scaffold.local_init_op,
            ready_op=scaffold.ready_op,
            ready_for_local_init_op=scaffold.ready_for_local_init_op,
            graph=v1.get_default_graph(),
            recovery_wait_secs=POLL_CHIEF_S,
        )
        with translate_chief_timeout(self._max_wait_secs) as bound_s:
            return manager.wait_for_session(self._master, config, bound_s)


def MonitoredTrainingSession(*args: Any, **kwargs: Any) -> Any:
    """`tf.train.MonitoredTrainingSession` of TensorFlow 1, with the same arguments.

    On a server of the job, waits are bounded and name the missing tasks. When a parameter server is lost, the session
    waits PHALANX_RETURN_TIMEOUT seconds for its return, and training continues from the last checkpoint in
    `checkpoint_dir`. `max_wait_secs` limits the wait for the chief; the default is PHALANX_RENDEZVOUS_TIMEOUT. The
    default of `stop_grace_period_secs` is 10.

    Returns: a `MonitoredSession`.

    Raises: RendezvousError naming the tasks that do not start in time. PeerLostError, from `run`, naming those that do
        not return.
    """
    given = _PARAMETERS.bind(*args, **kwargs).arguments
    master = given.get("master", "")
    if server_of(master) is None:
        return v1.train.MonitoredTrainingSession(**given)
    config = given["config"] = add_device_filters(master, given.get("config"), v1.get_default_graph())
    given.setdefault("stop_grace_period_secs", STOP_GRACE_S)
    scaffold = given["scaffold"] = given.get("scaffold") or v1.train.Scaffold()
    if given.get("is_chief", True):
        # TensorFlow finalizes the scaffold before it creates the session, and again after a loss.
        finalize = scaffold.finalize

        def await_and_finalize() -> Any:
            await_tasks(master, config)
            return finalize()

        scaffold.finalize = await_and_finalize
        return v1.train.MonitoredTrainingSession(**given)
    creator = WorkerSessionCreator(scaffold, master, config, given.get("max_wait_secs"))
    return v1.train.MonitoredSession(
        session_creator=creator, hooks=given.get("hooks"), stop_grace_period_secs=given["stop_grace_period_secs"]
    )


_PARAMETERS = inspect.signature(v1.train.MonitoredTrainingSession)
