"""Answers the observers of a job and executes their requests: the launcher's side of `job_connection`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from phalanx.config.task_names import count_workers
from phalanx.errors import ConfigurationError, FrameError
from phalanx.launcher.watching.job_connection import (
    MAX_REQUEST_BYTES,
    ControlAnswer,
    ControlRequest,
    is_same_user,
    peer_pid,
    short_name,
)
from phalanx.launcher.watching.job_recorder import JobRecorder
from phalanx.monitoring import job_events as events
from phalanx.monitoring.job_view import ACTIONS, why_not
from phalanx.transport.decoding import decode_json

if TYPE_CHECKING:
    from phalanx.elastic.coordinator_server import CoordinatorServer
    from phalanx.launcher.elastic_hosts.host_pool import HostPool
    from phalanx.launcher.job_supervisor import JobSupervisor

REQUEST_S = 2.0
"""Time limit for a client to send its request or read its answer, so that it does not delay the next client."""

FINAL_POLL_S = 2.5
"""Seconds for followers of the job to receive its end: they poll at least every two seconds."""


class RunningJob(NamedTuple):
    """The parts of a job that can be controlled: its tasks, and the hosts and members of an elastic job."""

    supervisor: JobSupervisor
    pool: HostPool | None = None
    membership: CoordinatorServer | None = None


class JobControl:
    """Serves one socket in its own thread, one request at a time. A context manager.

    Args:
        path: Path of the socket.
        recorder: Provides the view and the events of the job.

    Attributes:
        job: The current run; None before and between the runs of a job.
    """

    def __init__(self, path: Path, recorder: JobRecorder):
        self.job: RunningJob | None = None
        self._path = path
        self._recorder = recorder
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._serve, name="phalanx-job-control", daemon=True)
        # Followers of the job, by process: time of the last request, and number of the last event received.
        self._followers: dict[int, tuple[float, int]] = {}
        self._answered = threading.Condition()  # protects these; notified after each answer to one of them

    def __enter__(self) -> JobControl:
        # Training continues, unobserved, if the folder cannot hold a socket.
        with contextlib.suppress(OSError), short_name(self._path) as name:
            self._listener.bind(name)
            os.chmod(name, 0o600)  # before anyone can connect
            self._listener.listen()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            self._wait_for_followers()
        if self._thread.is_alive():
            with contextlib.suppress(OSError):  # wakes `accept`, on Linux
                self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._thread.ident is not None:
            self._thread.join(REQUEST_S)
        with contextlib.suppress(OSError):  # absent, or in a folder that cannot hold it
            self._path.unlink()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):  # ignore clients that are gone or slow
                connection.settimeout(REQUEST_S)
                if is_same_user(connection):
                    connection.sendall(self._answer(_read_line(connection), peer_pid(connection)))

    def _answer(self, line: bytes, pid: int) -> bytes:
        try:
            request = decode_json(line, ControlRequest)
            if request.action == "view":
                return self._changes(request.after, pid)
            if request.action == "output":
                return msgspec.json.encode(ControlAnswer(text=self._recorder.output_of(request.task)))
            answer = ControlAnswer(text=self._act(request))
        except (ConfigurationError, FrameError) as error:
            answer = ControlAnswer(refusal=str(error))
        return msgspec.json.encode(answer)

    def _changes(self, after: int, pid: int) -> bytes:
        number, lines = self._recorder.changes(after)
        if after < 0 or lines is None:
            number, view = self._recorder.numbered_view()
            answer = ControlAnswer(number=number, view=view)
        else:
            answer = ControlAnswer(number=number, events=[msgspec.Raw(line) for line in lines])
        if after >= 0:  # not its first request
            with self._answered:
                now = time.monotonic()
                self._followers = {pid: at for pid, at in self._followers.items() if now - at[0] < FINAL_POLL_S}
                self._followers[pid] = now, number
                self._answered.notify()
        return msgspec.json.encode(answer)

    def _wait_for_followers(self) -> None:
        """Wait until all followers have received the last event. Those that have stopped polling are ignored."""
        ended_at = time.monotonic()

        def is_known() -> bool:
            asked = [number for at, number in self._followers.values() if ended_at - at < FINAL_POLL_S]
            return min(asked, default=self._recorder.number) == self._recorder.number

        with self._answered:
            self._answered.wait_for(is_known, FINAL_POLL_S)

    def _act(self, request: ControlRequest) -> str:
        if request.action not in ACTIONS:
            raise ConfigurationError(f"A job can {', '.join(ACTIONS)}, and not {request.action}.")
        if reason := why_not(self._recorder.view, request.action):
            raise ConfigurationError(reason)
        if (job := self.job) is None:
            raise ConfigurationError("The job is just about to start or to end. Try again.")
        match request.action:
            case "stop":
                job.supervisor.stop(signal.SIGTERM)
                return "the job is asked to stop; a fit with a Checkpoint saves its state first"
            case "checkpoint":
                job.supervisor.loop.run_soon(job.supervisor.request_checkpoint)
                return "a checkpoint is written after the next step"
            case "scale":
                assert job.membership is not None, "`why_not` has refused"
                job.membership.scale(request.workers)
                job.supervisor.loop.run_soon(
                    lambda: self._recorder.record(events.WorkersRequested(time.time(), request.workers))
                )
                return f"{count_workers(request.workers)} requested; workers join or leave before the next step"
            case _:
                assert job.pool is not None, "`why_not` has refused"
                job.pool.drain(request.host)
                return f"the workers of {request.host} leave before the next step, and none starts there again"


def _read_line(connection: socket.socket) -> bytes:
    content = b""
    while not content.endswith(b"\n") and len(content) <= MAX_REQUEST_BYTES:
        data = connection.recv(MAX_REQUEST_BYTES)
        if not data:
            break
        content += data
    return content
