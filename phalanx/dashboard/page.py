"""The page: one HTML document without anything from elsewhere, for the dashboard and for reports."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

CONTENT_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def render(data: Any = None, *, nonce: str = "") -> str:
    """The document.

    Args:
        data: what a report shows; None for a page that asks its server.
        nonce: marks the document's own scripts and styles, for a browser that runs no others.
    """
    # No "<" may end the script element early, whatever a job has written.
    encoded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    parts = {
        "nonce": nonce,
        "style": _asset("style.css"),
        "data": encoded,
        "script": _asset("charts.js") + _asset("page.js"),
    }
    # In one pass: text that was inserted is never looked at again.
    return re.sub(r"\{(nonce|style|data|script)\}", lambda marker: parts[marker[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return resources.files("phalanx.dashboard").joinpath("assets", name).read_text(encoding="utf-8")
