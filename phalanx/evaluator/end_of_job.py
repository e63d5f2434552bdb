"""How an evaluator, which is no member of the job, learns that the job is over.

It asks at the ports. In synchronous training the chief listens until it leaves; with parameter servers the first server
does until all workers have left, whatever restarts meanwhile. So the job is over when nobody listens there any more.
Under `phalanx run`, which opens all ports before it starts the first task, that is so at once, also for an evaluator
that came so late that it saw nobody; a task that was started by hand may be started again, and gets a while for it.

A job without ports (one worker, by hand; no cluster at all) says it with a file in the directory of its checkpoints, or
by saving nothing for a long time.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.cluster.admission import PROBE
from phalanx.cluster.compatibility import JobFacts
from phalanx.cluster.peer_registry import TaskIdentity
from phalanx.cluster.spec import PS, ClusterSpec, Task
from phalanx.config.job_config import JobConfig
from phalanx.errors import HandshakeError, LinkClosedError, LinkTimeoutError
from phalanx.transport.dial import RefusedError, UnreachableError

GONE_LAUNCHED_S = 3.0
"""For how long nobody must have listened under `phalanx run`: whatever it starts again has its port all the while."""
GONE_BY_HAND_S = 60.0
"""The same without it: whoever watches a task, a person or a scheduler, needs a moment to start it again."""
PROBE_S = 1.0
PROBE_EVERY_S = 1.0


class JobSign(enum.Enum):
    """What is to be seen of a job."""

    ALIVE = "somebody answers"
    SILENT = "somebody may be there and does not answer"
    GONE = "nobody listens"


@dataclass(frozen=True)
class EndOfJobPatience:
    """How long to wait for what, in seconds.

    Attributes:
        start_s: for a first sign of the job, or a first checkpoint.
        gone_s: once nobody listens any more, where somebody did.
        silent_s: for somebody who does not answer, after the last answer or checkpoint.
        idle_s: for a new checkpoint, where nothing else tells whether the job goes on.
    """

    start_s: float
    gone_s: float
    silent_s: float
    idle_s: float


class JobEndDetector:
    """Decides from signs and times whether the job is over. Asks nobody itself.

    Args:
        now: when the evaluator began.
        launched: whether all ports of the job were open before, so that it is known to have been there.
    """

    def __init__(self, patience: EndOfJobPatience, now: float, *, launched: bool = False):
        self._patience = patience
        self._began = now
        self._seen = launched
        self._last_sign = now
        self._gone_since: float | None = None
        self._last_checkpoint: float | None = None

    @property
    def saw_nothing(self) -> bool:
        """Whether there was neither a sign of the job nor a checkpoint."""
        return not self._seen and self._last_checkpoint is None

    def checkpoint(self, now: float) -> None:
        """One was found."""
        self._last_checkpoint = self._last_sign = now

    def is_over(self, sign: JobSign, now: float, *, announced: bool) -> bool:
        """Whether the job is over.

        Args:
            announced: whether a file says so.
        """
        patience = self._patience
        if sign is not JobSign.GONE:
            self._seen, self._gone_since = True, None
        if sign is JobSign.ALIVE:
            self._last_sign = now
            return False
        if announced:
            return True
        if sign is JobSign.SILENT:
            return now - self._last_sign >= patience.silent_s
        if self._gone_since is None:
            self._gone_since = now
        if self._seen:
            return now - self._gone_since >= patience.gone_s
        if self._last_checkpoint is None:
            return now - self._began >= patience.start_s
        return now - self._last_checkpoint >= max(patience.idle_s, patience.start_s)


class JobSignPoller:
    """Asks at the ports of a job, not more often than once in a while.

    Args:
        spec: the cluster; an empty one has no ports.
        task: this process's.
    """

    def __init__(self, spec: ClusterSpec, task: Task | None, config: JobConfig, clock: Callable[[], float]):
        self._me = TaskIdentity(spec, task, JobFacts(), config) if spec and task is not None else None
        # The head of the servers has the schedule; the chief of replicas has all links.
        self._tasks = [*[known for known in spec.tasks if known.type == PS][:1], *spec.ranked_tasks[:1]]
        self._clock = clock
        self._asked_at = float("-inf")
        self._last = JobSign.GONE
        self.trouble = ""

    def look(self) -> JobSign:
        """What is to be seen now."""
        if self._me is not None and self._clock() - self._asked_at >= PROBE_EVERY_S:
            self._asked_at = self._clock()
            signs = [JobSign.GONE]
            for task in self._tasks:
                signs.append(self._ask(self._me, task))
                if signs[-1] is JobSign.ALIVE:
                    break
            self._last = (
                JobSign.ALIVE if JobSign.ALIVE in signs else JobSign.SILENT if JobSign.SILENT in signs else JobSign.GONE
            )
        return self._last

    def _ask(self, me: TaskIdentity, task: Task) -> JobSign:
        try:
            link, _ = me.dial(task, PROBE, deadline=time.monotonic() + PROBE_S)
            link.close()
        except RefusedError:
            return JobSign.ALIVE
        except (LinkTimeoutError, UnreachableError):
            return JobSign.SILENT
        except LinkClosedError:
            return JobSign.GONE
        except HandshakeError as error:  # another program has the port, or the secrets differ
            self.trouble = str(error)
            return JobSign.GONE
        return JobSign.ALIVE


def patience(config: JobConfig, idle_s: float) -> EndOfJobPatience:
    """As the environment says."""
    return EndOfJobPatience(
        start_s=config.rendezvous_timeout_s,
        gone_s=GONE_LAUNCHED_S if config.has_explicit_job_id else GONE_BY_HAND_S,
        silent_s=max(config.timeout_s, config.rendezvous_timeout_s),
        idle_s=idle_s,
    )
