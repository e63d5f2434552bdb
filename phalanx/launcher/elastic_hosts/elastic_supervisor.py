"""The launcher's side of an elastic job: runs the coordinator of its members and executes its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.launcher.elastic_hosts.host_pool import ElasticOptions
from phalanx.launcher.host_slots import HostSpec, find_local_name
from phalanx.launcher.job_observer import JobObserver
from phalanx.launcher.job_supervisor import JobSupervisor
from phalanx.launcher.worker_placement import new_identity
from phalanx.transport.address import LOOPBACK
from phalanx.transport.ports import listen_at

if TYPE_CHECKING:
    from phalanx.elastic.coordinator_server import CoordinatorServer


class ElasticSupervisor:
    """Opens the coordinator's port immediately, but serves it only once the workers are starting, since its imports
    take as long as theirs. A context manager.

    Args:
        host_specs: The known hosts.
        is_local_only: Whether all members will always be on this host.
        start_timeout_s: Seconds to wait for the members; None uses PHALANX_RENDEZVOUS_TIMEOUT.

    Attributes:
        address: Address of the coordinator, for the workers.
        identity: The secret and the id of the job.
    """

    def __init__(self, host_specs: Sequence[HostSpec], *, is_local_only: bool, start_timeout_s: float | None):
        self._start_timeout_s = start_timeout_s
        self._listener = listen_at(LOOPBACK if is_local_only else None)
        host = (
            LOOPBACK
            if is_local_only
            else find_local_name([host_spec for host_spec in host_specs if not host_spec.is_local])
        )
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.identity = new_identity()
        self._server: CoordinatorServer | None = None  # set by `start`; earlier connections wait in the backlog

    def __enter__(self) -> ElasticSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()  # closes the listener, too
        else:
            self._listener.close()

    def start(
        self, job: JobSupervisor, members: ElasticOptions, started: int, observer: JobObserver
    ) -> CoordinatorServer:
        """Serve the members of a started job; return the server, with which the launcher controls them.

        Args:
            job: Supervises the job in this process.
            members: Bounds on the number of members, and the number to begin with.
            started: Number of workers that have been started.
            observer: Receives each generation, and messages for the user.
        """
        from phalanx.config.job_config import JobConfig
        from phalanx.elastic.coordinator_server import CoordinatorServer
        from phalanx.elastic.member_table import MembershipLimits
        from phalanx.transport.credentials import Credentials
        from phalanx.transport.tls import load_tls

        config = JobConfig.from_environment()
        secret, job_id = self.identity
        self._server = CoordinatorServer(
            [self._listener],
            MembershipLimits(
                minimum=members.minimum,
                maximum=members.maximum,
                expected=min(members.initial_workers or started, started),
                start_s=self._start_timeout_s or config.rendezvous_timeout_s,
                timeout_s=config.timeout_s,
            ),
            credentials=Credentials(secret.encode(), load_tls(config.tls)),
            job=job_id,
            job_actions=_JobActions(job, observer),
        )
        return self._server


class _JobActions:
    """Implements `LauncherActions`: executes the coordinator's requests in the thread that runs the job."""

    def __init__(self, job: JobSupervisor, observer: JobObserver):
        self._job = job
        self._observer = observer

    def evict(self, task: str) -> None:
        self._job.loop.run_soon(lambda: self._job.kill(task))

    def release(self, task: str) -> None:
        self._job.loop.run_soon(lambda: self._job.release(task))

    def finish(self, tasks: Sequence[str]) -> None:
        self._job.loop.run_soon(lambda: self._job.finish(tasks))

    def fail(self, reason: str, code: int) -> None:
        self._job.loop.run_soon(lambda: self._job.abort(reason, code))

    def resize(self, workers: int) -> None:
        self._job.loop.run_soon(lambda: self._job.resize(workers))

    def generation_formed(self, generation: int, tasks: Sequence[str]) -> None:
        self._job.loop.run_soon(lambda: self._observer.generation_formed(generation, tasks))

    def training_changed(self, *, is_training: bool) -> None:
        self._job.loop.run_soon(lambda: self._job.training_changed(is_training=is_training))

    def log(self, text: str) -> None:
        self._job.loop.run_soon(lambda: self._log(text))

    def _log(self, text: str) -> None:
        if not self._job.is_shutting_down:  # otherwise the launcher ends the members itself
            self._observer.message(text)
