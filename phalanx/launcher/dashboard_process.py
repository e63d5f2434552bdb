"""Runs the dashboard of a job in a separate process, and creates the link that opens a dashboard.

The process that starts a dashboard opens its port and generates its token, so it can show the link immediately.
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
import subprocess
import sys
import urllib.parse
from dataclasses import dataclass
from types import TracebackType

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import DASHBOARD_TOKEN
from phalanx.errors import ConfigurationError
from phalanx.launcher.orphan_reaper import exempt
from phalanx.transport.address import LOOPBACK

DEFAULT_PORT = 8787
TOKEN_BYTES = 24
MIN_TOKEN_CHARACTERS = 16
PACKAGES = ("starlette", "uvicorn", "prometheus_client")
FINAL_POLL_S = 5.0
"""Seconds that the launcher waits for open pages to receive the end of the job."""


def check_packages() -> None:
    """Check the dashboard's packages. Raises: ConfigurationError naming those that are not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"The dashboard needs {' and '.join(missing)}, not installed here: "
            "`pip install starlette uvicorn prometheus-client psutil nvidia-ml-py`."
        )


@dataclass(frozen=True)
class DashboardLink:
    """An open port on loopback, and the token that a browser must present there."""

    listener: socket.socket
    token: str

    def __str__(self) -> str:
        token = urllib.parse.quote(self.token, safe="")  # the user may have chosen it
        return f"http://{LOOPBACK}:{self.listener.getsockname()[1]}/?token={token}"


def open_link(port: int | None = None) -> DashboardLink:
    """Create a link for a dashboard that is about to start.

    Args:
        port: Port to listen on; None for the default port, or a free one if that is taken.

    Raises: ConfigurationError if the port is taken, or PHALANX_DASHBOARD_TOKEN is too short.
    """
    token = process_environment().get(DASHBOARD_TOKEN) or secrets.token_urlsafe(TOKEN_BYTES)
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigurationError(
            f"{DASHBOARD_TOKEN} has {len(token)} characters; use at least {MIN_TOKEN_CHARACTERS} random ones, or leave "
            "it unset for a new token each time."
        )
    try:
        return DashboardLink(socket.create_server((LOOPBACK, DEFAULT_PORT if port is None else port)), token)
    except OSError as error:
        if port is None:
            return DashboardLink(socket.create_server((LOOPBACK, 0)), token)
        raise ConfigurationError(
            f"Port {port} of {LOOPBACK} cannot be used: {error.strerror}. Give another --port, or none."
        ) from error


class DashboardProcess:
    """Shows one job of this process until it is closed. A context manager.

    Args:
        job: Id of the job.
        control: Whether its buttons are enabled.

    Attributes:
        address: URL of the dashboard.
    """

    def __init__(self, job: str, *, control: bool):
        self._link = open_link()
        self.address = str(self._link)
        self._arguments = ["--job", job, "--listen-fd", str(self._link.listener.fileno())]
        self._arguments += ["--control"] if control else []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DashboardProcess:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "dashboard", *self._arguments],
            stdin=subprocess.PIPE,  # closed when this process exits, however it does
            stdout=subprocess.DEVNULL,
            pass_fds=[self._link.listener.fileno()],
            env={**process_environment(), DASHBOARD_TOKEN: self._link.token},
            start_new_session=True,  # Ctrl-C must only reach the job
        )
        exempt(self._process.pid)
        self._link.listener.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(FINAL_POLL_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
