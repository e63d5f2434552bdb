"""TLS between tasks: encrypts, and admits only holders of a certificate that the job's authority signed.

Both ends show a certificate. Names in certificates are not compared with addresses: tasks are addressed by
names and numbers that schedulers make up, and the authority is the job's own, so that whoever it signed for
is one of us. Do not use a public authority here. The secret's handshake runs inside and stays necessary.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from phalanx.config.job_config import TLSFiles
from phalanx.config.variables import TLS_CA, TLS_CERT, TLS_KEY
from phalanx.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TLS:
    """The two contexts of a task: it listens with one and dials with the other."""

    listener: ssl.SSLContext
    dialer: ssl.SSLContext


def load_tls(files: TLSFiles | None) -> TLS | None:
    """The contexts for the given PEM files; None for None.

    Raises: ConfigurationError if they are no certificate, key and authority that belong together.
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
            f"{TLS_CERT}={str(files.certificate)!r} and {TLS_KEY}={str(files.key)!r} are no certificate "
            f"with its key, as unencrypted PEM files: {error}."
        ) from error
    try:
        context.load_verify_locations(files.authority)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{TLS_CA}={str(files.authority)!r} is no certificate of an authority in a PEM file: {error}."
        ) from error
    return context
