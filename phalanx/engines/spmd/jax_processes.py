"""Several processes become one JAX program, which spans the devices of all of them.

JAX's processes meet at a service in the process of rank 0, whose address Phalanx's communicator broadcasts. When a
process dies, JAX notices late, hangs in the collective that misses it, or aborts (jax-ml/jax#38503). So a
`LostPeerWatch` ends this process at once, with the error that names the lost member.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
from typing import Any

import jax
import msgspec
from jax._src import distributed
from jax.experimental import multihost_utils

from phalanx.cluster.lost_peer_watch import LostPeerWatch
from phalanx.cluster.membership import Membership
from phalanx.collectives.communicator import Communicator
from phalanx.devices.memory_growth import is_initialized
from phalanx.errors import ConfigurationError, PeerLostError
from phalanx.runtime import process_exit
from phalanx.transport.address import LOOPBACK, Address
from phalanx.transport.decoding import decode_message
from phalanx.transport.ports import NO_SUCH_ADDRESS

FAILED_EXIT_S = 30.0
"""Time limit for the exit of a process that has failed by itself: what it started on its devices may hang."""
END_WITHIN_S = 2.0
"""Time limit for the exit handlers of a process that has lost a peer."""
LOSS_NOTICE_S = 1.0
"""Wait for the end of a peer's link after a failed JAX collective. Both are noticed at about the same time."""
_ALL_ADDRESSES = "::"


class LocalDevices(msgspec.Struct, frozen=True):
    """The devices that one process contributes to the program; `platform` is a name such as `gpu`."""

    count: int
    platform: str
    kind: str


class JaxProcesses:
    """This process's part in the program. Created by `connect_processes`.

    Args:
        membership: The processes, by rank.
        timeout_s: Limit for the start, and for how long JAX itself waits for a process that does not answer.
    """

    def __init__(self, membership: Membership, timeout_s: float):
        self._membership = membership
        self._timeout_s = round(timeout_s)
        self._watch = LostPeerWatch(membership, "a computation of all processes", self._end)

    def start(self, coordinator: str, bind_address: str | None) -> None:
        """Join the program.

        Args:
            coordinator: Address at which the others find JAX's service.
            bind_address: Address at which rank 0 starts it; None on other ranks.
        """
        config: Any = jax.config
        if "jax_enable_preemption_service" in config.values:  # it would catch SIGTERM, which makes `fit` save
            config.update("jax_enable_preemption_service", False)
        if config.jax_cpu_collectives_implementation is None:
            # Without one, JAX on CPUs has no collectives between processes.
            config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator,
            self._membership.world_size,
            self._membership.rank,
            cluster_detection_method="deactivate",
            initialization_timeout=self._timeout_s,
            # The watch is faster. These only bound waits for a connected process that does not answer.
            heartbeat_timeout_seconds=self._timeout_s,
            shutdown_timeout_seconds=self._timeout_s,
            coordinator_bind_address=bind_address,
        )
        process_exit.add_cause_finder(self._find_loss)
        self._watch.start()

    def close(self) -> None:
        """Leave the program at the same time as all others; at once if this process has failed."""
        self._watch.close()
        if process_exit.has_failed():
            _abandon_service()
            process_exit.exit_after(FAILED_EXIT_S)
        else:
            jax.distributed.shutdown()

    def _end(self, loss: PeerLostError) -> None:
        # JAX aborts this process as soon as its service, on rank 0, is gone.
        process_exit.exit_with_error(loss, within_s=END_WITHIN_S, skip_exit_handlers=loss.rank == 0)

    def _find_loss(self, error: BaseException) -> PeerLostError | None:
        """Return the loss that made a JAX collective fail."""
        is_jax = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        return self._watch.wait_for_loss(LOSS_NOTICE_S) if is_jax else None


# A process can join a JAX program once in its life.
_processes: JaxProcesses | None = None


def connect_processes(communicator: Communicator, timeout_s: float) -> JaxProcesses | None:
    """Make one JAX program of all processes, so that `jax.devices()` are the devices of all. All ranks must call this
    before JAX has used a device. Calling it again has no effect.

    Args:
        communicator: Communicator between the processes. JAX numbers them by its ranks.
        timeout_s: See `JaxProcesses`.

    Returns: The program, which the caller closes before the communicator's links; None if there is only one process, or
        if the program already exists.
    Raises: ConfigurationError on all ranks if JAX is in use on one of them, or if the devices of the processes differ.
    """
    global _processes
    if communicator.world_size == 1 or _processes is not None:
        return None
    membership = communicator.membership
    _check_jax_unused(communicator)
    port = (
        _ReservedPort(Address.parse(membership.local_member.address, where="rank 0").host)
        if communicator.rank == 0
        else None
    )
    with contextlib.ExitStack() as stack:
        if port is not None:
            stack.callback(port.close)
        coordinator = communicator.broadcast_bytes(port.address.encode() if port else b"").decode()
        processes = JaxProcesses(membership, timeout_s)
        processes.start(coordinator, port.bind_address if port else None)
    _processes = processes
    try:
        check_same_devices(membership, _all_devices(communicator))
        # Gloo connects at the first collective, and waits 30 s. Now all are here; later, one may import or read data.
        multihost_utils.sync_global_devices("phalanx")
    except BaseException:
        processes.close()
        raise
    return processes


def check_same_devices(membership: Membership, devices: list[LocalDevices]) -> None:
    """Raise ConfigurationError if a process has other devices than the first."""
    for member, own in zip(membership.members, devices, strict=True):
        if own != devices[0]:
            found = ", ".join(
                f"{member.task} has {each.count} of {each.platform} ({each.kind})"
                for member, each in zip(membership.members, devices, strict=True)
            )
            raise ConfigurationError(
                f"One program spans the devices of all processes, and each must have equally many of one kind; "
                f"{member.task} differs: {found}. Start all with the same `phalanx run --devices-per-worker`, or set "
                f"CUDA_VISIBLE_DEVICES so that each sees as many."
            )


def _check_jax_unused(communicator: Communicator) -> None:
    begun = [bool(each[0]) for each in communicator.all_gather_bytes(bytes([is_initialized("jax")]))]
    if any(begun):
        tasks = [member.task for member, late in zip(communicator.membership.members, begun, strict=True) if late]
        raise ConfigurationError(
            f"JAX has used a device already on {', '.join(tasks)}, and cannot join the other processes any more. "
            f"Create the strategy at the start of the program, before a model, a tensor or a call of jax.devices()."
        )


def _all_devices(communicator: Communicator) -> list[LocalDevices]:
    local = jax.local_devices()
    own = LocalDevices(len(local), local[0].platform, local[0].device_kind)
    payloads = communicator.all_gather_bytes(msgspec.msgpack.encode(own))
    return [decode_message(payload, LocalDevices) for payload in payloads]


class _ReservedPort:
    """A port that the system has chosen, reserved for a server that this process is about to start.

    Its socket has SO_REUSEPORT, and so has gRPC's: no other user can take the port meanwhile, and a socket that is only
    bound receives no connections.

    Args:
        host: This process's host as the others reach it. If it is an IP address of this host, the server
            listens only there.

    Attributes:
        address: Address at which the others find the server.
        bind_address: Address at which the server listens.
    """

    def __init__(self, host: str):
        host = LOOPBACK if Address(host, 0).is_loopback and host != "::1" else host
        bound = host if Address(host, 0).is_ip else _ALL_ADDRESSES
        try:
            self._socket = _bind_socket(bound)
        except OSError as error:
            if error.errno not in NO_SUCH_ADDRESS:  # not an address of this host: behind address translation
                raise
            bound = _ALL_ADDRESSES if error.errno == errno.EADDRNOTAVAIL else "0.0.0.0"
            self._socket = _bind_socket(bound)
        port = self._socket.getsockname()[1]
        self.address, self.bind_address = str(Address(host, port)), str(Address(bound, port))

    def close(self) -> None:
        self._socket.close()


def _bind_socket(host: str) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, 0))
    except BaseException:
        bound.close()
        raise
    return bound


def _abandon_service() -> None:
    """Leave JAX's service to the exit of this process: an orderly shutdown waits for the others, and then aborts."""
    state = distributed.global_state
    for owned in (state.preemption_sync_manager, state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))  # their destructors would also wait and abort
    state.preemption_sync_manager = state.client = state.service = None
