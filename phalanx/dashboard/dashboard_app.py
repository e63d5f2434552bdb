"""The endpoints of the dashboard, as an ASGI application.

GET  /          the page; with the token from the link, it sets the cookie for the other endpoints
GET  /events    the data of the page, as server-sent events
GET  /output    the end of a task's output
GET  /metrics   the same figures for Prometheus
POST /act       stop, checkpoint, scale, drain
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.dashboard import access, browser_view, page, prometheus_metrics
from phalanx.dashboard.job_hub import FollowedJob, JobHub, ask
from phalanx.errors import ConfigurationError, FrameError, LinkClosedError
from phalanx.launcher.watching.job_connection import ControlRequest
from phalanx.monitoring.job_endings import RUNNING
from phalanx.monitoring.job_view import ACTIONS, JobView
from phalanx.transport.decoding import decode_json

WATCHED_S = 0.75
"""Interval between updates while someone watches. Each update costs the workers some cache."""
UNWATCHED_S = 2.0
MAX_BODY_BYTES = 4096
_HEADERS = {
    b"cache-control": b"no-store",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
}


class Dashboard:
    """Shared state of the request handlers.

    Args:
        hub: Source of the jobs.
        token: Access token; see `access`.
        port: Port of this server.
        control: Whether the buttons are enabled.

    """

    def __init__(self, hub: JobHub, *, token: str, port: int, control: bool = False):
        self.hub = hub
        # Only the event loop uses this state; only `hub.update` and `ask` run in threads.
        self._is_closing = False
        self._token, self._port, self._control = token, port, control
        self._watchers = 0  # open streams
        self._woken = asyncio.Event()  # set when a stream opens: update at once, and then more often
        self._news = asyncio.Event()  # replaced after each update of the jobs

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/", self.show_page),
                Route("/events", self.stream_events),
                Route("/output", self.show_output),
                Route("/metrics", self.show_metrics),
                Route("/act", self.act, methods=["POST"]),
            ],
            middleware=[Middleware(_Guard, token=self._token, port=self._port)],
            lifespan=self._lifespan,
        )

    def close(self) -> None:
        """End the streams, because the server is about to stop."""
        self._is_closing = True
        self._tell_streams()

    async def refresh(self) -> None:
        """Update the jobs and notify the streams."""
        await asyncio.to_thread(self.hub.update)
        self._tell_streams()

    def _tell_streams(self) -> None:
        # Replaced, not cleared: a stream that is sending holds the old event and finds it set when it waits for it.
        news, self._news = self._news, asyncio.Event()
        news.set()

    # Handlers.

    async def show_page(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        response = HTMLResponse(page.render(nonce=nonce))
        response.headers["content-security-policy"] = page.CONTENT_POLICY.format(nonce=nonce)
        if request.query_params.get("token"):
            # Not a redirect: after a link from another site, browsers would not send a strict cookie with it.
            name, value = access.cookie_name(self._port), access.cookie_value(self._token)
            response.set_cookie(name, value, httponly=True, samesite="strict", path="/")
        return response

    async def stream_events(self, request: Request) -> Response:
        return StreamingResponse(self.events(request.query_params.get("job", "")), media_type="text/event-stream")

    async def events(self, name: str) -> AsyncIterator[str]:
        """Stream the data of a page that shows this job, or the newest job if `name` is empty."""
        self._watchers += 1
        self._woken.set()
        listed: Any = None
        before: JobView | None = None
        problem = ""
        try:
            while True:
                # Not polled: on fully used cores, each wake-up costs the workers more than it computes.
                news = self._news  # before the update, so that changes between it and the wait count
                job = self.hub.find(name)
                name = name if job is None else job.entry.job
                listing = {"jobs": self.hub.listing(), "job": name if job is not None else None}
                if listing != listed:
                    listed = listing
                    yield _event(listing, "jobs")
                if job is not None:
                    # Read each attribute once, and the view last: all of them may change meanwhile.
                    is_gone, former, problem = job.follower.is_gone, problem, job.follower.problem
                    view = job.view
                    if view.started is not None and (view is not before or problem != former):
                        yield _event(browser_view.message(view, before, control=self._control, problem=problem))
                        before = view
                    # The job has ended, or its launcher was killed. Without `only`, the page lists further jobs.
                    if (view.status != RUNNING or is_gone) and self.hub.only is not None:
                        yield _event({}, "over")
                        return
                if self._is_closing:
                    return
                await news.wait()
        finally:
            self._watchers -= 1

    async def show_output(self, request: Request) -> Response:
        job = self.hub.find(request.query_params.get("job", ""))
        if job is None:
            return PlainTextResponse("No such job.", 404)
        return await self._asked(job, ControlRequest("output", task=request.query_params.get("task", "")), text=True)

    async def show_metrics(self, request: Request) -> Response:
        await self.refresh()
        # If the launcher was killed or does not answer, the last figures are out of date.
        views = [job.view for job in self.hub.jobs.values() if not job.follower.problem]
        content, kind = prometheus_metrics.expose(views)
        return Response(content, media_type=kind)

    async def act(self, request: Request) -> Response:
        if access.foreign(request.headers):
            return JSONResponse({"refusal": "This request does not come from the dashboard's own page."}, 403)
        if not self._control:
            return JSONResponse({"refusal": browser_view.READ_ONLY}, 403)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"refusal": f"A request has at most {MAX_BODY_BYTES} bytes."}, 413)
        try:
            asked = decode_json(body, _Act)
        except FrameError as error:
            return JSONResponse({"refusal": f"This is not a request: {error}."}, 400)
        if asked.action not in ACTIONS:
            return JSONResponse({"refusal": f"There is no action {asked.action!r}."}, 400)
        job = self.hub.find(asked.job or "")
        if job is None:
            return JSONResponse({"refusal": "No such job."}, 404)
        return await self._asked(job, ControlRequest(asked.action, workers=asked.workers, host=asked.host))

    async def _asked(self, job: FollowedJob, request: ControlRequest, *, text: bool = False) -> Response:
        try:
            answer = await asyncio.to_thread(ask, job, request)
        except ConfigurationError as error:
            return JSONResponse({"refusal": str(error)}, 409)
        except LinkClosedError as error:
            if text:  # the page is not yet notified of the end and keeps its content
                return Response(status_code=204)
            return JSONResponse({"refusal": str(error)}, 410)
        return PlainTextResponse(answer.text) if text else JSONResponse({"text": answer.text})

    # The asyncio task that follows the jobs.

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()  # an update in a thread ends by itself, within `ANSWER_S` per job
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _follow(self) -> None:
        while True:
            await self.refresh()
            with contextlib.suppress(asyncio.TimeoutError):
                self._woken.clear()
                await asyncio.wait_for(self._woken.wait(), UNWATCHED_S if not self._watchers else WATCHED_S)


class _Act(msgspec.Struct, frozen=True):
    """The body of a POST to `/act`."""

    action: str
    job: str | None = None
    workers: int = 0
    host: str = ""


class _Guard:
    """Middleware that rejects the requests that `access` refuses, and adds headers to all responses."""

    def __init__(self, app: ASGIApp, token: str, port: int):
        self._app, self._token, self._port = app, token, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            # Not in the handlers: refusals, errors and streams need these headers, too.
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS.items()]
            await send(message)

        request = Request(scope)
        reason = access.refusal(request.headers, request.query_params.get("token", ""), self._token, self._port)
        handler: ASGIApp = PlainTextResponse(reason, 403) if reason else self._app
        await handler(scope, receive, send_with_headers)


def _event(data: dict[str, Any], kind: str = "message") -> str:
    return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n"
