"""The far end of `phalanx run --hosts`: runs workers on its host for a launcher at the other end of ssh.

Commands come on stdin and answers go to stdout, one JSON object (`messages.py`) a line. The secret travels in
the specs, so through the encrypted connection and on no command line. The end of stdin is the end of the launcher or
of the connection: every worker here is then killed, and should the agent itself be killed, the workers' lifelines do
the same.
"""

from __future__ import annotations

import os
import selectors
import signal

import msgspec

from phalanx.launcher.host_messages import (
    Answer,
    Command,
    DumpStacks,
    Prepare,
    Prepared,
    Refused,
    Restart,
    Signal,
    Start,
)
from phalanx.launcher.hosts.local_host import PACE_S, LocalHost, OutputStreams
from phalanx.runtime.orphan_guard import adopt_orphans, end_orphans

READ_BYTES = 65536
POLL_S = 0.1


class LineReader:
    """Bytes in, whole lines out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line for line in lines if line.strip()]


class RemoteAgent:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._host = LocalHost(self._selector, streams=OutputStreams())
        self._commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)

    def run(self) -> None:
        """Serve the launcher until it is gone."""
        reader = LineReader()
        self._selector.register(0, selectors.EVENT_READ)
        try:
            # A login script may have left a line without its end, such as a sequence that sets a terminal's title.
            os.write(1, b"\n")
            while True:
                timeout = POLL_S if self._host.needs_polling else PACE_S
                ready = [key.fd for key, _ in self._selector.select(timeout)]
                for event in self._host.events():
                    self._answer(event)
                if 0 in ready:
                    data = os.read(0, READ_BYTES)
                    if not data:
                        return
                    for line in reader.feed(data):
                        self._obey(self._commands.decode(line))
        except BrokenPipeError:
            return
        finally:
            self._host.close()
            end_orphans()

    def _obey(self, command: Command) -> None:
        match command:
            case Prepare(workers, folder):
                try:
                    os.chdir(folder)
                except OSError as error:
                    self._answer(Refused(f"cannot work in {folder}: {error.strerror}. It must exist there too"))
                    return
                self._answer(Prepared(self._host.prepare(workers, address=None)))
            case Start(specs):
                for event in self._host.start(specs):
                    self._answer(event)
            case Restart(rank):
                self._answer(self._host.restart(rank))
            case Signal(rank, number):
                self._host.signal(rank, number)
                for event in self._host.events():
                    self._answer(event)
            case DumpStacks(rank):
                self._host.dump_stacks(rank)

    def _answer(self, answer: Answer) -> None:
        data = msgspec.json.encode(answer) + b"\n"
        while data:
            data = data[os.write(1, data) :]


def main() -> None:
    # Ctrl-C at the launcher reaches ssh's group, and with it an agent that runs on the same host: the launcher decides.
    # A handler and not SIG_IGN, which the workers would inherit.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    adopt_orphans()
    RemoteAgent().run()


if __name__ == "__main__":
    main()
