"""The far end of `phalanx run --hosts`: runs workers on its host for a launcher at the other end of ssh.

Commands come on stdin and answers go to stdout, one JSON object (`host_messages`) per line. The secret travels in the
specs, so through the encrypted connection and on no command line. The end of stdin is the end of the launcher or of the
connection: every worker here is then killed. So are they after `SILENCE_S` without a command: behind a network that was
cut, the launcher may have started others in their place. If the agent itself is killed, the workers' orphan guards do
the same.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time

import msgspec

from phalanx.errors import ConfigurationError
from phalanx.launcher.host_messages import (
    SILENCE_S,
    Answer,
    Command,
    DumpStacks,
    KeepAlive,
    LineReader,
    Prepare,
    Prepared,
    Refused,
    RequestCheckpoint,
    Restart,
    Signal,
    Start,
)
from phalanx.launcher.hosts.local_host import REPORT_INTERVAL_S, LocalHost
from phalanx.launcher.orphan_reaper import adopt_orphans, end_orphans
from phalanx.transport.decoding import Decoder

READ_BYTES = 65536
POLL_S = 0.1


class RemoteAgent:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._host = LocalHost(self._selector)
        self._decoder: Decoder[Command] = Decoder(Command, json=True)
        self._lease_ends_at = float("inf")  # by `time.monotonic`, once a worker has been started

    def run(self) -> None:
        """Serve the launcher until it is gone."""
        reader = LineReader()
        self._selector.register(0, selectors.EVENT_READ)
        try:
            # A login script may have left a line without its end, such as a sequence that sets a terminal's title.
            os.write(1, b"\n")
            while True:
                timeout = POLL_S if self._host.needs_polling else REPORT_INTERVAL_S
                ready = [key.fd for key, _ in self._selector.select(timeout)]
                for event in self._host.events():
                    self._send(event)
                if time.monotonic() > self._lease_ends_at:
                    print(f"phalanx: no sign of the launcher for {SILENCE_S:g} s: ending its workers", file=sys.stderr)
                    return
                if 0 in ready:
                    data = os.read(0, READ_BYTES)
                    if not data:
                        return
                    for line in reader.feed(data):
                        self._execute(self._decoder.decode(line))
                    if self._lease_ends_at < float("inf"):
                        self._lease_ends_at = time.monotonic() + SILENCE_S
        except BrokenPipeError:
            return
        finally:
            self._host.close()
            end_orphans()

    def _execute(self, command: Command) -> None:
        match command:
            case Prepare(workers, directory, address):
                try:
                    os.chdir(directory)
                except OSError as error:
                    self._send(Refused(f"cannot work in {directory}: {error.strerror}. It must exist there too"))
                    return
                self._send(Prepared(self._host.prepare(workers, address=address)))
            case KeepAlive():
                pass
            case Start(specs):
                self._lease_ends_at = time.monotonic() + SILENCE_S
                for event in self._host.start(specs):
                    self._send(event)
            case Restart(rank):
                self._send(self._host.restart(rank))
            case Signal(rank, number):
                self._host.signal(rank, number)
                for event in self._host.events():
                    self._send(event)
            case DumpStacks(rank):
                self._host.dump_stacks(rank)
            case RequestCheckpoint(rank):
                self._host.request_checkpoint(rank)

    def _send(self, answer: Answer) -> None:
        data = msgspec.json.encode(answer) + b"\n"
        while data:
            data = data[os.write(1, data) :]


def main() -> None:
    # Ctrl-C at the launcher reaches ssh's process group, and with it an agent on the same host, but the launcher
    # decides what it means. A handler instead of SIG_IGN, which the workers would inherit.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    adopt_orphans()
    try:
        RemoteAgent().run()
    except ConfigurationError as error:
        sys.exit(f"phalanx: {socket.gethostname()}: {error}")


if __name__ == "__main__":
    main()
