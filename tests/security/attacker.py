"""Someone on the path between two tasks: a proxy that sees, keeps, changes and sends bytes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from phalanx.transport.address import Address

TO_LISTENER, TO_DIALER = 0, 1

Change = Callable[[int, bytes, int], bytes]
"""What becomes of a chunk, given its direction and the number of bytes that went this way before."""


@dataclass
class Proxy:
    """What went through, by direction.

    Attributes:
        address: where to dial.
        seen: all bytes, before they were changed.
    """

    address: Address
    seen: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))


@contextlib.contextmanager
def proxy_to(
    target: Address,
    change: Change = lambda direction, chunk, before: chunk,
    is_open: threading.Event | None = None,
) -> Iterator[Proxy]:
    """Relays each connection to `target`, and passes what comes through `change`.

    Args:
        is_open: while it is not set, nothing passes, and no end of a connection either, as behind a cut cable.
    """
    stopping, proxy_end = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, stopping, proxy_end:
        proxy = Proxy(Address("127.0.0.1", server.getsockname()[1]))

        def relay(near: socket.socket, far: socket.socket) -> None:
            sources = {near: (far, TO_LISTENER), far: (near, TO_DIALER)}
            with near, far, contextlib.suppress(OSError):
                while True:
                    ready, _, _ = select.select([*sources, proxy_end], [], [])
                    for source in ready:
                        if source is proxy_end:
                            return
                        target, direction = sources[source]
                        chunk = source.recv(1 << 16)
                        if is_open is not None:
                            is_open.wait()
                        if not chunk:
                            return
                        before = len(proxy.seen[direction])
                        proxy.seen[direction].extend(chunk)
                        target.sendall(change(direction, chunk, before))

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = server.accept()
                    far = socket.create_connection((target.host, target.port))
                    threading.Thread(target=relay, args=(near, far), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield proxy
        stopping.close()
