"""Sends requests to the launcher of a running job, to query its state or to control it.

The launcher answers on a Unix socket in this user's folder of jobs. The kernel identifies the user of each end to the
other, so no secret is needed or stored. A connection carries one request and one answer, each a line of JSON.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from phalanx.errors import ConfigurationError, FrameError, LinkClosedError
from phalanx.monitoring.job_view import JobView
from phalanx.transport.decoding import decode_json

ANSWER_S = 5.0
MAX_REQUEST_BYTES = 4096
MAX_PATH_BYTES = 100
"""Maximum length of a socket's name; the kernels' limits are 104 and 108."""


class ControlRequest(msgspec.Struct, frozen=True):
    """A request to a job's launcher.

    Attributes:
        action: `view`, `output`, `stop`, `checkpoint`, `scale` or `drain`.
        after: Number of the last event received (`view`); -1 for the whole view.
        task: The task whose output is requested (`output`).
        workers: Requested number of workers (`scale`).
        host: The host to withdraw (`drain`).
    """

    action: str = "view"
    after: int = -1
    task: str = ""
    workers: int = 0
    host: str = ""


class ControlAnswer(msgspec.Struct, frozen=True):
    """The launcher's answer.

    Attributes:
        refusal: Reason for a refusal; empty if the request is fulfilled.
        text: Message that describes the effect of the request, or the end of a task's output.
        number: Number of the last event.
        view: The whole view, if it was requested or the events are no longer kept.
        events: The events after number `after`.
    """

    refusal: str = ""
    text: str = ""
    number: int = -1
    view: JobView | None = None
    events: list[msgspec.Raw] = []


def send_request(path: Path, request: ControlRequest, *, timeout_s: float = ANSWER_S) -> ControlAnswer:
    """Send a request to a launcher and return its answer.

    Args:
        path: Path of the launcher's socket.
        request: The request.
        timeout_s: Seconds for each part of the exchange.

    Raises:
        ConfigurationError: the request cannot be fulfilled.
        LinkClosedError: the launcher does not answer; raised from a `TimeoutError` if it exists but is silent.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, short_name(path) as name:
            connection.settimeout(timeout_s)
            connection.connect(name)
            if not is_same_user(connection):
                raise PermissionError(errno.EPERM, "its socket belongs to another user", str(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            content = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        answer = decode_json(content, ControlAnswer)
    except (OSError, FrameError) as error:
        raise LinkClosedError(f"the launcher of the job does not answer: {error}") from error
    if answer.refusal:
        raise ConfigurationError(answer.refusal)
    return answer


def is_same_user(connection: socket.socket) -> bool:
    """Whether a process of this user, or of root, is at the other end. Outside Linux, the socket's permissions ensure
    this."""
    return _peer(connection)[1] in (os.getuid(), 0)


def peer_pid(connection: socket.socket) -> int:
    """Id of the process at the other end; 0 if unknown."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Ids of the process and the user at the other end. Source: unix(7), SO_PEERCRED."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0, os.getuid()
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """A name for the socket that is short enough for the kernel, however deep its folder is."""
    if len(os.fsencode(path)) <= MAX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
