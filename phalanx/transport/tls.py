"""TLS between tasks: encrypts, and admits only holders of a certificate signed by the job's authority.

Both ends present a certificate. Names in certificates are not compared with addresses: schedulers invent the names and
numbers of tasks, and the authority is the job's own, so every holder of its certificates belongs to the job. Do not
use a public authority here. The secret handshake runs inside TLS and remains necessary.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from phalanx.config.environment_variables import TLS_CA, TLS_CERT, TLS_KEY
from phalanx.config.job_config import TLSFiles
from phalanx.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TLS:
    """The two contexts of a task: one for listening and one for dialing."""

    listener: ssl.SSLContext
    dialer: ssl.SSLContext


def load_tls(files: TLSFiles | None) -> TLS | None:
    """Load the contexts from PEM files; None for None.

    Raises: ConfigurationError unless they are a certificate, its key, and an authority.
    """
    if files is None:
        return None
    return TLS(listener=_context(ssl.PROTOCOL_TLS_SERVER, files), dialer=_context(ssl.PROTOCOL_TLS_CLIENT, files))


def _context(protocol: int, files: TLSFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.certificate, files.key)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{TLS_CERT}={str(files.certificate)!r} and {TLS_KEY}={str(files.key)!r} are not a certificate "
            f"and its key in unencrypted PEM files: {error}."
        ) from error
    try:
        context.load_verify_locations(files.authority)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{TLS_CA}={str(files.authority)!r} is not the certificate of an authority in a PEM file: {error}."
        ) from error
    return context
