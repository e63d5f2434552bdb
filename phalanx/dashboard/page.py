"""The page: one self-contained HTML document, for the dashboard and for reports."""

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
    """Render the document.

    Args:
        data: Data of a report; None for a page that loads its data from the server.
        nonce: Nonce of the document's scripts and styles; the browser runs no others.
    """
    # Escape "<", so that output of a job cannot close the script element.
    encoded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    parts = {
        "nonce": nonce,
        "style": _asset("style.css"),
        "data": encoded,
        "script": _asset("charts.js") + _asset("page.js"),
    }
    # In one pass, so that inserted text is not substituted again.
    return re.sub(r"\{(nonce|style|data|script)\}", lambda marker: parts[marker[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return resources.files("phalanx.dashboard").joinpath("assets", name).read_text(encoding="utf-8")
