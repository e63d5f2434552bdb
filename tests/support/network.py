"""Simulates hosts on one machine: network namespaces on a bridge, with cables that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.weather import Weather, carry

UNUSED_HARDWARE_ADDRESS = "02:00:00:00:00:01"
"""A hardware address that no interface has. Packets to it are silently lost."""


class Network:
    """Network namespaces on one bridge: hosts 10.77.<n>.1, 10.77.<n>.2, ...; this machine is 10.77.<n>.254. They exist
    within a `with` block.

    Args:
        weather: Conditions on the cable between each host and the bridge.
    """

    def __init__(self, hosts: int, weather: Weather | None = None):
        self.name = f"phx{os.getpid() % 10_000}"
        self._hosts, self._weather = hosts, weather
        self._carrier: subprocess.Popen[bytes] | None = None
        self.subnet = f"10.77.{os.getpid() % 250}"

    @staticmethod
    def problem(weather: Weather | None = None) -> str:
        """Why it cannot be created here; empty if it can."""
        if shutil.which("ip") is None or os.geteuid() != 0:
            return "network namespaces need the ip command and root"
        try:
            with Network(1, weather):
                return ""
        except subprocess.CalledProcessError as error:
            return f"network namespaces cannot be made here: {error.stderr.decode().strip()}"
        except OSError as error:
            return f"TAP devices cannot be made here: {error}"

    def __enter__(self) -> Network:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._down()

    def _up(self) -> None:
        self._run("link", "add", self.name, "type", "bridge")
        self._run("addr", "add", f"{self.address(254)}/24", "dev", self.name)
        self._run("link", "set", self.name, "up")
        self._lay_cables()
        for host in range(1, self._hosts + 1):
            space, outer, inner = self.space(host), self._outer(host), self._inner(host)
            self._run("netns", "add", space)
            self._run("link", "set", outer, "master", self.name, "up")
            self._run("link", "set", inner, "netns", space)
            self._run("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", inner)
            self._run("-n", space, "link", "set", inner, "up")
            self._run("-n", space, "link", "set", "lo", "up")

    def _lay_cables(self) -> None:
        """Create one cable per host, with both ends still on this machine."""
        ends = [(self._outer(host), self._inner(host)) for host in range(1, self._hosts + 1)]
        if self._weather is not None:
            self._carrier = carry(self._weather, ends)
            return
        for outer, inner in ends:
            self._run("link", "add", outer, "type", "veth", "peer", "name", inner)

    def _down(self) -> None:
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.wait()
        for host in range(1, self._hosts + 1):
            self._run("netns", "del", self.space(host), check=False)
            self._run("link", "del", self._outer(host), check=False)
        self._run("link", "del", self.name, check=False)

    def space(self, host: int) -> str:
        return f"{self.name}h{host}"

    def address(self, host: int) -> str:
        return f"{self.subnet}.{host}"

    def prefix(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.space(host)]

    @property
    def slots(self) -> str:
        """Value for `phalanx run --hosts`: all hosts with one task each."""
        return ",".join(f"{self.address(host)}:1" for host in range(1, self._hosts + 1))

    def launcher(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Return the prefix of the command `phalanx run --hosts` for these hosts, and the variables that it needs.

        It reaches them through a script instead of ssh, and passes the name of its host, here an address, to the
        workers.
        """
        spaces = [f"  {self.address(host)}) space={self.space(host)} ;;" for host in range(1, self._hosts + 1)]
        script = [
            "#!/bin/sh",
            'while [ "$#" -gt 2 ]; do shift; done  # the last two arguments are a host and a command',
            'case "$1" in',
            *spaces,
            "esac",
            'exec ip netns exec "$space" env PHALANX_HOST_ID="$1" sh -c "$2"',
        ]
        path = folder / "ssh"
        path.write_text("\n".join(script) + "\n")
        path.chmod(0o755)
        name = f'echo {self.address(254)} > /proc/sys/kernel/hostname && exec "$@"'
        return ["unshare", "--uts", "sh", "-c", name, "launcher"], {"PHALANX_SSH": str(path)}

    # Faults. Each can be repeated and undone.

    def cut(self, host: int) -> None:
        """Silence a host, as a power failure does: no packet, no reset."""
        self._run("link", "set", self._outer(host), "nomaster")

    def mend(self, host: int) -> None:
        self._run("link", "set", self._outer(host), "master", self.name)

    def mute(self, host: int, towards: int) -> None:
        """Drop what a host sends to another host. The other direction works."""
        entry = (self.address(towards), "lladdr", UNUSED_HARDWARE_ADDRESS, "nud", "permanent", "dev", self._inner(host))
        self._run("-n", self.space(host), "neigh", "replace", *entry)

    def unmute(self, host: int, towards: int) -> None:
        entry = (self.address(towards), "dev", self._inner(host))
        self._run("-n", self.space(host), "neigh", "del", *entry, check=False)

    def slow(self, host: int, mbits: float, delay_ms: int) -> None:
        """Limit the rate of the cable to a host, on which packets wait for up to `delay_ms`."""
        shape = ("rate", f"{mbits}mbit", "burst", "16kb", "latency", f"{delay_ms}ms")
        self._traffic("qdisc", "replace", "dev", self._outer(host), "root", "tbf", *shape)

    def widen(self, host: int) -> None:
        self._traffic("qdisc", "del", "dev", self._outer(host), "root", check=False)

    def _outer(self, host: int) -> str:
        return f"{self.name}o{host}"

    def _inner(self, host: int) -> str:
        return f"{self.name}i{host}"

    @staticmethod
    def _run(*arguments: str, check: bool = True) -> None:
        subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=30)

    @staticmethod
    def _traffic(*arguments: str, check: bool = True) -> None:
        subprocess.run(["tc", *arguments], check=check, capture_output=True, timeout=30)
