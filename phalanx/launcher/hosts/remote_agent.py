"""The remote end of `phalanx run --hosts`: runs workers on its host for a launcher at the other end of ssh.

The agent reads commands from stdin and writes answers to stdout, one JSON object (`host_messages`) per line. The secret
is part of the specs, so it passes through the encrypted connection and appears on no command line. EOF on stdin means
the end of the launcher or of the connection; the agent then kills all its workers, as it does when the launcher is
silent (`launcher_channel`). If the agent itself is killed, the workers' orphan guards do the same.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys

from phalanx.errors import ConfigurationError
from phalanx.launcher.host_messages import (
    Command,
    DumpStacks,
    KeepAlive,
    Prepare,
    Prepared,
    Refused,
    RequestCheckpoint,
    Restart,
    Signal,
    Start,
)
from phalanx.launcher.hosts.launcher_channel import LauncherChannel, LauncherLostError
from phalanx.launcher.hosts.local_host import REPORT_INTERVAL_S, LocalHost
from phalanx.launcher.orphan_reaper import adopt_orphans, end_orphans

POLL_S = 0.1


class RemoteAgent:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._host = LocalHost(self._selector)
        self._launcher = LauncherChannel(self._selector)

    def run(self) -> None:
        """Serve the launcher until it is gone."""
        try:
            while True:
                self._selector.select(POLL_S if self._host.needs_polling else REPORT_INTERVAL_S)
                for event in self._host.events():
                    self._launcher.send(event)
                for command in self._launcher.commands():
                    self._execute(command)
        except LauncherLostError:
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
                    self._launcher.send(
                        Refused(f"cannot work in {directory}: {error.strerror}. It must exist there too")
                    )
                    return
                self._launcher.send(Prepared(self._host.prepare(workers, address=address)))
            case KeepAlive():
                pass
            case Start(specs):
                self._launcher.begin_lease()
                for event in self._host.start(specs):
                    self._launcher.send(event)
            case Restart(rank):
                self._launcher.send(self._host.restart(rank))
            case Signal(rank, number):
                self._host.signal(rank, number)
                for event in self._host.events():
                    self._launcher.send(event)
            case DumpStacks(rank):
                self._host.dump_stacks(rank)
            case RequestCheckpoint(rank):
                self._host.request_checkpoint(rank)


def main() -> None:
    # Ctrl-C at the launcher reaches ssh's process group, including an agent on the same host, but only the launcher
    # acts on it. A handler instead of SIG_IGN, which the workers would inherit.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    adopt_orphans()
    try:
        RemoteAgent().run()
    except ConfigurationError as error:
        sys.exit(f"phalanx: {socket.gethostname()}: {error}")


if __name__ == "__main__":
    main()
