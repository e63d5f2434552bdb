"""The process that serves the dashboard: `phalanx dashboard`, or started by `phalanx run --dashboard`.

It is a separate process with a low priority (`nice`), so that it does not slow down the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable

import uvicorn

from phalanx.dashboard.dashboard_app import WATCHED_S, Dashboard
from phalanx.dashboard.job_hub import JobHub

NICENESS = 10
LOOK_S = 0.25
FINAL_POLL_S = 2 * WATCHED_S
"""How long open pages have to receive the end of the job."""


def serve(
    listener: socket.socket, token: str, *, job: str | None, control: bool, until: Callable[[], object] | None = None
) -> None:
    """Serve until Ctrl-C, or until `until` returns.

    Args:
        listener: Listening socket on loopback.
        token: Access token; see `access`.
        job: ID of the only job to show; None for all.
        control: Whether the buttons are enabled.
        until: Function that blocks, in a thread, as long as the server is needed.
    """
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn re-raises it after a clean shutdown
        asyncio.run(_serve(listener, token, JobHub(job), control=control, until=until))


async def _serve(
    listener: socket.socket, token: str, hub: JobHub, *, control: bool, until: Callable[[], object] | None
) -> None:
    dashboard = Dashboard(hub, token=token, port=listener.getsockname()[1], control=control)
    config = uvicorn.Config(
        dashboard.app(),
        log_level="error",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=2,
        http="h11",  # not httptools, uvicorn's default, which does not limit the size of headers
        ws="none",
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    waiting = None if until is None else asyncio.create_task(asyncio.to_thread(until))
    while not server.should_exit:
        await asyncio.sleep(LOOK_S)
        if waiting is not None and waiting.done():
            # The launcher has ended its job or is gone. If it still answers, this update gets the last events.
            await dashboard.refresh()
            await asyncio.sleep(FINAL_POLL_S)
            server.should_exit = True
    dashboard.close()  # open streams would keep the server from stopping
    await serving


def wait_for_launcher() -> None:
    """Wait until the launcher, which holds the other end of stdin, has ended its job or has exited."""
    sys.stdin.buffer.read()
