"""Requests of users about a running elastic job: `phalanx status` and `phalanx scale`."""

from __future__ import annotations

import time

import msgspec

from phalanx.config.job_config import TLSFiles
from phalanx.errors import ConfigurationError
from phalanx.monitoring.stragglers import StepSeconds, StepTiming
from phalanx.transport.address import Address
from phalanx.transport.credentials import Credentials
from phalanx.transport.dial import RefusedError, dial
from phalanx.transport.handshake import Hello
from phalanx.transport.tls import load_tls

LAUNCHER = "the launcher"
"""The name of the elastic coordinator as a task, in messages too."""
CONTROL = "control"
"""Purpose of a connection that requests the state of the job or another number of workers."""
IMPOSSIBLE = "impossible"
"""Refusal: the request cannot be fulfilled."""
ANSWER_S = 5.0


class ScaleRequest(msgspec.Struct, frozen=True):
    """Request this number of workers; None only requests the state."""

    workers: int | None = None


class MemberStatus(msgspec.Struct, frozen=True):
    """A process of the job; `rank` is -1 for a candidate.

    Attributes:
        timing: its last sign of life, with its position in the program.
        silent_s: seconds since its last message.
        step_seconds: how it divides the time of a step, over the last seconds; None if unknown.
        is_slow: whether the others wait for it.
    """

    rank: int
    task: str
    host: str
    pid: int
    timing: StepTiming
    silent_s: float
    step_seconds: StepSeconds | None = None
    is_slow: bool = False


class HostStatus(msgspec.Struct, frozen=True):
    """A host on which workers may run.

    Attributes:
        slots, taken: the number of workers that it can run, and that it runs.
        blacklisted_until: in seconds of the monotonic clock of the launcher's host, if it is blacklisted; `reason` says
            why.
    """

    name: str
    slots: int
    taken: int
    blacklisted_until: float | None = None
    reason: str = ""


class ElasticJobStatus(msgspec.Struct, frozen=True):
    """The state of an elastic job.

    Attributes:
        generation: the number of the current generation; 0 before the first one.
        minimum, maximum: the allowed number of members.
        activity: what the members are doing if they are not training: `gathering` or `regrouping`; else empty.
        steps_per_s: the training speed over the last seconds; 0 if unknown.
        members: all processes, members first, in rank order.
        hosts: the hosts on which workers may run.
    """

    generation: int
    minimum: int
    maximum: int
    activity: str
    steps_per_s: float
    members: list[MemberStatus]
    hosts: list[HostStatus] = []


def send_request(
    coordinator: str, secret: str, job: str, request: ScaleRequest, *, tls: TLSFiles | None = None
) -> ElasticJobStatus:
    """Send a request to the elastic coordinator of a job; returns the state of the job.

    Args:
        coordinator: the address of the coordinator, `host:port`.
        secret: the secret of the job.
        job: the id of the job.
        request: what is requested.
        tls: the certificates of the job, if it is encrypted.

    Raises: ConfigurationError if the request cannot be fulfilled; LinkClosedError or LinkTimeoutError if there is no
        answer.
    """
    hello = Hello(purpose=CONTROL, task="phalanx", peer=LAUNCHER, job=job, details=msgspec.msgpack.encode(request))
    try:
        link, welcome = dial(
            Address.parse(coordinator, where="the job's file"),
            hello,
            credentials=Credentials(secret.encode(), load_tls(tls)),
            deadline=time.monotonic() + ANSWER_S,
        )
    except RefusedError as error:
        raise ConfigurationError(error.welcome.reason) from error
    link.close()
    return msgspec.msgpack.decode(welcome.details, type=ElasticJobStatus)
