"""`hvd.run`: run a function in several processes that form a job, from Python or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.launcher.host_slots import check_interfaces, choose_hosts
from phalanx.launcher.launch_function import launch

_HERE = ("localhost", "127.0.0.1", "::1")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    host_discovery_script: str | None = None,
    network_interfaces: str | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` in each of `num_proc` new processes on this host.

    In the function, `hvd.init()` joins the job. `phalanx.launch` does the work; see there for errors.

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of processes; `np` is its older name.
        hosts: Only this host, with at least as many slots as processes: `localhost:2`. `hostfile` has the same content.
        start_timeout: Seconds that the processes wait for each other.
        output_filename: Folder for the output, one file per process.
        network_interface: A network interface, which must exist; processes on one host do not need it.
        network_interfaces: The newer name of `network_interface`.
        host_discovery_script: Not supported: elastic jobs on other hosts need a script instead of a function.
        verbose: Ignored, as are `slots`, `reset_limit`, `cooldown_range`, `disable_cache`, `use_gloo`, and `ssh_port`
            and `ssh_identity_file`, which are for other hosts.

    Returns: the results in rank order.

    Raises:
        ConfigurationError: the hosts have fewer slots than there are processes.
        UnsupportedError: other hosts, another Python, MPI, or a range of processes (`min_num_proc`) is requested.
    """
    number = num_proc if np is None or num_proc != 1 else np
    _check_fixed(number, min_num_proc or min_np, max_num_proc or max_np)
    if (script := host_discovery_script) is not None:
        raise _elsewhere(f"{script!r} finds others", f"--workers 1:{number} --host-discovery-script {script}")
    if use_mpi or mpi_args:
        raise UnsupportedError("hvd.run(use_mpi=True) needs MPI; Phalanx does not use MPI. Leave it out.")
    if executable not in (None, sys.executable):
        raise UnsupportedError(f"hvd.run starts this Python, {sys.executable}, and not {executable}.")
    if hosts is not None and hostfile is not None:
        raise ConfigurationError("hosts and hostfile both name hosts. Give one of them.")
    shares = choose_hosts(number, hosts, None if hostfile is None else Path(hostfile))
    if any(share.name not in _HERE for share in shares):
        raise _elsewhere(
            f"{hosts or hostfile!r} names others", f"-np {number} {'-H' if hosts else '--hostfile'} {hosts or hostfile}"
        )
    check_interfaces(network_interfaces or network_interface, shares)
    return launch(func, number, args, kwargs, start_timeout_s=start_timeout, log_dir=output_filename)


def _elsewhere(what: str, options: str) -> UnsupportedError:
    return UnsupportedError(
        f"hvd.run starts processes on this host, and {what}. Put the function into a script and use `phalanx run "
        f"{options} script.py`."
    )


def _check_fixed(number: int, minimum: int | None, maximum: int | None) -> None:
    if any(bound not in (None, number) for bound in (minimum, maximum)):
        raise UnsupportedError(
            f"hvd.run starts {number} processes and no other number. For an elastic job, put the function into a "
            f"script and use `phalanx run -np {number} --min-np {minimum or number} --max-np {maximum or number} "
            f"script.py`."
        )
