"""Stands in for ssh, and is the network between a host and the others: what it carries stops while it is stopped.

    cable.py ... HOST COMMAND

The host is a loopback address, 127.0.X.N, and what runs there listens on 127.1.X.N. Two processes carry what goes in
and out; a test stops one or both (SIGSTOP), so that nothing arrives and nothing is refused, as behind a cut cable:

`up`    between the launcher and the host: the connection of ssh, and those of members to the coordinator.
`side`  from the members on other hosts. Ends of connections that the host sees are its own: they stay open while the
        host is cut off, even if the launcher has given it up.

$CABLES is a folder: `HOST.up` and `HOST.side` list the processes, and while there is `HOST.cut`, nothing new connects.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COORDINATOR = "PHALANX_ELASTIC_COORDINATOR"
KEPT = ("PATH", "HOME", "PYTHONPATH", "PHALANX_TEST_MARK", "PHALANX_TIMEOUT")
FOLDER = Path(os.environ.get("CABLES", "."))


def wait_until_mended(host: str) -> None:
    while (FOLDER / f"{host}.cut").exists():
        time.sleep(0.05)


def in_thread(body: Callable[..., Any], *arguments: Any) -> None:
    threading.Thread(target=body, args=arguments, daemon=True).start()


def carry(source: int, target: int, change: Callable[[bytes], bytes] = lambda data: data) -> None:
    """Until the source ends or the target takes nothing more."""
    with contextlib.suppress(OSError):
        while data := os.read(source, 65536):
            view = memoryview(change(data))
            while view:
                view = view[os.write(target, view) :]


def serve(listener: socket.socket, connect: Callable[[], socket.socket], host: str = "") -> None:
    """Carry each connection both ways. With a host, its end of a connection closes only while it can be reached."""

    def both_ways(near: socket.socket) -> None:
        with near:
            try:
                far = connect()
            except OSError:
                return
            with far:
                in_thread(lambda: (carry(near.fileno(), far.fileno()), shut(far)))
                carry(far.fileno(), near.fileno())
                if host:
                    wait_until_mended(host)
                shut(near)

    while True:
        in_thread(both_ways, listener.accept()[0])


def shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class Lines:
    """Whole lines, each changed by a function."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._rest, self._change = b"", change

    def __call__(self, data: bytes) -> bytes:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return b"".join(self._change(line.decode()).encode() + b"\n" for line in lines)


def up(host: str, pipe: socket.socket, gate: socket.socket) -> None:
    """Between launcher and host."""
    coordinator: list[str] = []
    inner = json.dumps(f"127.0.0.1:{gate.getsockname()[1]}")  # the host's own end of `gate`

    def to_host(line: str) -> str:
        if found := re.search(rf'"{COORDINATOR}":"([^"]*)"', line):
            coordinator[:] = [found[1]]
        line = re.sub(rf'"{COORDINATOR}":"[^"]*"', f'"{COORDINATOR}":{inner}', line)
        return line.replace(f'"address":"{host}"', f'"address":"{inside(host)}"')

    def to_coordinator() -> socket.socket:
        name, _, port = coordinator[0].rpartition(":")
        return socket.create_connection((name, int(port)))

    far = socket.create_server(("127.0.0.1", 0))
    pipe.sendall(f"{far.getsockname()[1]}\n".encode())
    in_thread(serve, far, to_coordinator)
    in_thread(lambda: (carry(0, pipe.fileno(), Lines(to_host)), pipe.shutdown(socket.SHUT_WR)))
    carry(pipe.fileno(), 1)


def side(host: str, command: str, pipe: socket.socket, gate: socket.socket) -> None:
    """The host's end, where its agent runs, and what other hosts connect to."""
    reader = pipe.makefile("rb", 0)
    far = ("127.0.0.1", int(reader.readline()))
    in_thread(serve, gate, lambda: socket.create_connection(far), host)
    environment = {**{name: os.environ[name] for name in KEPT if name in os.environ}, "REMOTE_HOST": host}
    agent = subprocess.Popen(
        ["sh", "-c", command], env=environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    feed, said = agent.stdin, agent.stdout

    def from_host(line: str) -> str:
        if line.startswith("{") and (message := json.loads(line)).get("type") == "prepared":
            for port in message["ports"]:
                listener = socket.create_server((host, port))
                in_thread(serve, listener, lambda port=port: socket.create_connection((inside(host), port)))
        return line

    def feed_agent() -> None:
        carry(pipe.fileno(), feed.fileno())
        wait_until_mended(host)
        feed.close()

    in_thread(feed_agent)
    carry(said.fileno(), pipe.fileno(), Lines(from_host))
    shut(pipe)
    agent.wait()


def inside(host: str) -> str:
    return host.replace("127.0.", "127.1.", 1)


def note(host: str, which: str) -> None:
    with (FOLDER / f"{host}.{which}").open("a") as file:
        file.write(f"{os.getpid()}\n")


def main() -> None:
    host, command = sys.argv[-2:]
    wait_until_mended(host)
    near, far = socket.socketpair()
    gate = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        near.close()
        os.setsid()
        os.close(0)
        os.close(1)
        note(host, "side")
        side(host, command, far, gate)
        os._exit(0)
    far.close()
    note(host, "up")
    up(host, near, gate)


if __name__ == "__main__":
    main()
