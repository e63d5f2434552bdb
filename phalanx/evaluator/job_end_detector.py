"""Detects the end of a job for an evaluator, which is not a member of the job.

The evaluator probes the ports. In synchronous training, the chief listens until it leaves. With parameter servers, the
first server listens until all workers have left, even if some restart meanwhile. So the job is over when no task
listens there. `phalanx run` opens all ports before it starts the first task, so this holds immediately, also for an
evaluator that starts too late to see any task. A task that was started manually may restart, and gets time to do so.

A job without ports (one worker, started manually; no cluster) writes a file into its checkpoint directory, or saves
nothing for a long time. The file of a former job stays until the chief of the next job starts its session. So a file
that existed from the start does not stop the evaluator before the new chief has had time to start.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from phalanx.cluster.peer_identification import PROBE
from phalanx.cluster.spec import PS, ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.job_config import JobConfig
from phalanx.errors import HandshakeError, LinkClosedError, LinkTimeoutError
from phalanx.transport.dial import RefusedError, UnreachableError

GONE_LAUNCHED_S = 3.0
"""How long all ports must be closed under `phalanx run`, which keeps the port of a restarting task open."""
GONE_MANUAL_S = 60.0
"""The same without `phalanx run`: the user or a scheduler needs time to restart a task."""
PROBE_S = 1.0
PROBE_EVERY_S = 1.0


class JobLiveness(enum.Enum):
    """The result of probing a job."""

    ALIVE = "a task answers"
    UNRESPONSIVE = "a task may be there but does not answer"
    STOPPED = "no task listens"


class JobEndDetector:
    """Decides from probe results and times whether the job is over. Probes nothing itself.

    Args:
        config: The configuration, with the timeouts of tasks and whether `phalanx run` has opened all ports.
        idle_s: Longest time in seconds until the next checkpoint, if nothing else shows whether the job continues.
        now: Start time of the evaluator (monotonic seconds).
    """

    def __init__(self, config: JobConfig, idle_s: float, now: float):
        self._start_s = config.rendezvous_timeout_s  # until the first answer or checkpoint
        self._gone_s = GONE_LAUNCHED_S if config.has_explicit_job_id else GONE_MANUAL_S
        # After the last answer or checkpoint, while a task does not answer.
        self._silent_s = max(config.timeout_s, config.rendezvous_timeout_s)
        self._idle_s = idle_s
        # All times are on the clock of `now`.
        self._began = now
        self._has_existed = config.has_explicit_job_id  # whether the job is known to have existed
        self._last_seen_at = now  # last sign of life of the job: an answer, or a checkpoint
        self._gone_since: float | None = None  # None while anything may listen
        self._last_checkpoint: float | None = None
        self._was_unmarked = False  # if so, a completion marker is from this job

    @property
    def has_seen_nothing(self) -> bool:
        """Whether neither the job nor a checkpoint has been seen."""
        return not self._has_existed and self._last_checkpoint is None

    def record_checkpoint(self, now: float) -> None:
        """Record that a checkpoint was found."""
        self._last_checkpoint = self._last_seen_at = now

    def is_over(self, found: JobLiveness, now: float, *, has_marker: bool | None) -> bool:
        """Return whether the job is over.

        Args:
            has_marker: Whether a file marks it as over; None if currently unknown.
        """
        self._was_unmarked |= has_marker is False
        if found is not JobLiveness.STOPPED:
            self._has_existed, self._gone_since = True, None
        if found is JobLiveness.ALIVE:
            self._last_seen_at = now
            return False
        if has_marker and self._was_unmarked:
            return True
        if found is JobLiveness.UNRESPONSIVE:
            return now - self._last_seen_at >= self._silent_s
        if self._gone_since is None:
            self._gone_since = now
        # A job that was seen is over when its ports stay closed; a job that was not seen may have no ports.
        if self._has_existed:
            return now - self._gone_since >= self._gone_s
        if self._last_checkpoint is None:
            return now - self._began >= self._start_s
        # There were checkpoints, perhaps from an earlier job: this one still has time to start.
        idle_s = 0.0 if has_marker else self._idle_s
        return now - self._last_checkpoint >= max(idle_s, self._start_s)


class JobProbe:
    """Probes the ports of a job at a limited rate.

    Args:
        spec: The cluster; an empty one has no ports.
        task: The task of this process.
    """

    def __init__(self, spec: ClusterSpec, task: Task | None, config: JobConfig, clock: Callable[[], float]):
        self._identity = TaskIdentity(spec, task, JobFacts(), config) if spec and task is not None else None
        # The first server has the schedule; the chief of replicas has all links.
        self._tasks = [*[known for known in spec.tasks if known.type == PS][:1], *spec.ranked_tasks[:1]]
        self._clock = clock
        self._probed_at = float("-inf")
        self._last = JobLiveness.STOPPED
        self.last_error = ""

    def probe(self) -> JobLiveness:
        """Return the current state of the job."""
        if self._identity is not None and self._clock() - self._probed_at >= PROBE_EVERY_S:
            self._probed_at = self._clock()
            found = [JobLiveness.STOPPED]
            for task in self._tasks:
                found.append(self._probe_task(self._identity, task))
                if found[-1] is JobLiveness.ALIVE:
                    break
            self._last = next(each for each in JobLiveness if each in found)  # the liveliest
        return self._last

    def _probe_task(self, identity: TaskIdentity, task: Task) -> JobLiveness:
        try:
            link, _ = identity.dial(task, PROBE, deadline=time.monotonic() + PROBE_S)
            link.close()
        except RefusedError:  # by a task that has recognized this one, so it is alive
            return JobLiveness.ALIVE
        except (LinkTimeoutError, UnreachableError):
            return JobLiveness.UNRESPONSIVE
        except LinkClosedError:
            return JobLiveness.STOPPED
        except HandshakeError as error:  # another program uses the port, or the secrets differ
            self.last_error = str(error)
            return JobLiveness.STOPPED
        return JobLiveness.ALIVE
