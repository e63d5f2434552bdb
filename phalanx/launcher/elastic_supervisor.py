"""The launcher's part in a job whose members come and go: it runs the keeper (`cluster.elastic`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from phalanx.launcher.host_slots import HostShare, own_name
from phalanx.launcher.hosts.local_host import listen
from phalanx.launcher.job_supervisor import JobSupervisor
from phalanx.launcher.worker_placement import LOOPBACK, new_identity

if TYPE_CHECKING:
    from phalanx.elastic.coordinator_server import CoordinatorServer


@dataclass(frozen=True, slots=True)
class SlotState:
    """A host of the job, for `phalanx status`.

    Attributes:
        slots, taken: how many workers it can run, and runs.
        aside_until: by the monotonic clock, if it is set aside; `reason` says why.
    """

    name: str
    slots: int
    taken: int
    aside_until: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerNumbers:
    """How many workers: at least, at most, and how many the job begins with if they come in time."""

    minimum: int
    maximum: int
    expected: int


class ElasticSupervisor:
    """Opens the keeper's port at once, and serves it when the workers are on their way: its imports take as long as
    theirs. A context manager.

    Attributes:
        address: of the keeper, for the workers.
        identity: the job's secret and name.

    Args:
        shares: the hosts that are known.
        stays_here: whether all members will always be on this host.
    """

    def __init__(self, shares: Sequence[HostShare], *, stays_here: bool, start_timeout_s: float | None):
        self._start_timeout_s = start_timeout_s
        self._listener = listen(LOOPBACK if stays_here else None)
        host = LOOPBACK if stays_here else own_name([share for share in shares if not share.is_here])
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.identity = new_identity()
        self._server: CoordinatorServer | None = None

    def __enter__(self) -> ElasticSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        else:
            self._listener.close()

    def begin(self, job: JobSupervisor, numbers: WorkerNumbers, say: Callable[[str], None]) -> None:
        """Serve the members of a job that has been started.

        Args:
            say: shows a line. It is called in the thread that runs the job.
        """
        from phalanx.config.job_config import JobConfig
        from phalanx.elastic.coordinator_server import CoordinatorServer
        from phalanx.elastic.elastic_coordinator import MembershipLimits
        from phalanx.transport.tls import load_tls

        config = JobConfig.from_environment()
        secret, job_id = self.identity
        bounds = MembershipLimits(
            minimum=numbers.minimum,
            maximum=numbers.maximum,
            expected=numbers.expected,
            start_s=self._start_timeout_s or config.rendezvous_timeout_s,
            timeout_s=config.timeout_s,
        )

        def note(text: str) -> None:
            if not job.is_ending:  # members that the launcher ends are no news
                say(text)

        self._server = CoordinatorServer(
            [self._listener],
            bounds,
            secret=secret.encode(),
            job=job_id,
            evict=lambda task: job.run_soon(lambda: job.kill(task)),
            over=lambda tasks: job.run_soon(lambda: job.end_others(tasks)),
            failed=lambda: job.run_soon(job.give_up),
            released=lambda task: job.run_soon(lambda: job.release(task)),
            resized=lambda workers: job.run_soon(lambda: job.recall(workers)),
            note=lambda text: job.run_soon(lambda: note(text)),
            tls=load_tls(config.tls),
        )
        # Its connections tell it as well, but not where the network is cut, or the host's power.
        server = self._server
        job.on_loss = lambda task: server.use(lambda keeper, now: keeper.lose(task, now))

    def withdraw(self, task: str) -> None:
        """This worker is to leave before a next step: its host is taken back."""
        if self._server is not None:
            self._server.use(lambda keeper, now: keeper.withdraw(task, now))

    def readmit(self, task: str) -> None:
        """The worker of this name is about to start anew."""
        if self._server is not None:
            self._server.use(lambda keeper, now: keeper.readmit(task))

    def limit(self, workers: int) -> None:
        """There will never be more workers than these."""
        if self._server is not None:
            self._server.use(lambda keeper, now: keeper.limit(workers, now))

    def show(self, places: Sequence[SlotState]) -> None:
        """Have `phalanx status` know the hosts."""
        from phalanx.elastic.job_control import HostState

        if self._server is not None:
            self._server.hosts = [HostState(**asdict(place)) for place in places]
