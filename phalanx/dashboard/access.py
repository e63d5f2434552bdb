"""Access control of the dashboard. Pure decisions about the headers of a request.

The server listens on loopback, where every user and every web page of this machine can reach it. Each request must
therefore prove that it comes from someone who has seen the link: with the token in it, the cookie that the link sets,
or a bearer token (Prometheus). `Host` must name this machine, so that another site cannot resolve to this server (DNS
rebinding). Requests that change anything must come from the page itself.
"""

from __future__ import annotations

import hmac
import urllib.parse
from collections.abc import Mapping

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


def cookie_name(port: int) -> str:
    """Name of the cookie. Includes the port: several dashboards may run, and browsers send cookies to all ports of a
    host."""
    return f"phalanx-{port}"


def cookie_value(token: str) -> str:
    """The token, quoted for use in a cookie, because a user may have chosen it."""
    return urllib.parse.quote(token, safe="")


def refusal(headers: Mapping[str, str], query_token: str, token: str, port: int) -> str:
    """Reason to refuse a request; empty if it is allowed.

    Args:
        headers: Request headers, with lower-case names.
        query_token: Token from the URL; empty if there is none.
        token: Expected token.
        port: Port of this server.
    """
    host = headers.get("host", "")
    if _name_of(host) not in LOOPBACK_NAMES:
        return f"This server is not called {host!r}. Open it as http://localhost, through an ssh tunnel from elsewhere."
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    shown = [query_token, bearer if scheme.lower() == "bearer" else "", _cookie(headers.get("cookie", ""), port)]
    if not any(hmac.compare_digest(each.encode(), token.encode()) for each in shown):
        return "Open the dashboard by the link that `phalanx` has printed: it ends with a token."
    return ""


def foreign(headers: Mapping[str, str]) -> bool:
    """Whether a request that changes something comes from elsewhere than the dashboard's page.

    Source: Fetch standard, `Origin`; Fetch Metadata, `Sec-Fetch-Site`.
    """
    origin, host = headers.get("origin", ""), headers.get("host", "")
    return origin != f"http://{host}" or headers.get("sec-fetch-site", "same-origin") != "same-origin"


def _name_of(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def _cookie(header: str, port: int) -> str:
    # Not SimpleCookie, which stops at the first cookie that it rejects: other programs on this host set cookies too,
    # and browsers send them to all ports.
    pairs = (pair.partition("=") for pair in header.split(";"))
    found = next((value for name, _, value in pairs if name.strip() == cookie_name(port)), "")
    return urllib.parse.unquote(found.strip())
