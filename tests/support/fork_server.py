"""Starts Python programs as forks of a process that has already imported Keras and its backend.

Importing Keras with a backend takes three to five seconds of a core, most of the cost of a short job. A *template*
(`fork_template`) is a process that has done so once and has computed nothing: no device, no thread pool, no thread.
`popen` forks it where `subprocess.Popen` would have started `python`, and returns a real `Popen` of a real child of
this process: it has a process ID, dies from signals, and is waited for like any other.

How a fork of the template becomes a child of this process: the template forks twice, the intermediate process exits,
and the kernel reparents its child to the nearest ancestor that adopts orphans (`PR_SET_CHILD_SUBREAPER`). This process
does so while it waits for the answer.

A fork has the command line, environment, descriptors, folder, session, signals, standard streams and random numbers of
a started program, and is `__main__`. Differences: imports cost nothing (those that `lazy_imports` defers are deferred
for plain programs as well), all forks of a template have the same string hashes, NumPy computes with one thread, and
the interpreter is not torn down at the end. Tests of these start real processes. So does `popen` if a variable that an
import reads has a different value than in the template.

`phalanx run`, or a program with `starts_others=True`, is forked together with its own template. Its `subprocess.Popen`
then forks what it would start with `python`: workers share imports as well, and are children of the launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.support.backends import ON_GPU
from tests.support.commands import ROOT, die_with_parent

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # from <sys/prctl.h>
MAX_REQUEST_BYTES, MAX_DESCRIPTORS = 1 << 20, 64
IMPORTED_BACKENDS = ("jax", "tensorflow", "torch")
"""Backends with templates. Keras on NumPy imports quickly enough."""
ANSWER_BOUND_S = 120.0
"""Limit for an answer. A template imports everything before its first answer."""

# Variables that are read during imports, except those that are also read later or that the fork applies itself.
READ_BY_IMPORTS = (
    *("CUDA_", "JAX_", "KERAS_", "LD_", "MALLOC_", "NVIDIA_"),
    *("PYTHON", "PYTORCH_", "TF_", "TORCH_", "XLA_"),
)
READ_LATER = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "JAX_COMPILATION_CACHE_DIR",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "TF_CONFIG",
        "TF_NUM_INTEROP_THREADS",
        "TF_NUM_INTRAOP_THREADS",
    }
)

_start_process = subprocess._fork_exec  # type: ignore[attr-defined]
_lock = threading.RLock()  # one request at a time, because this process adopts orphans meanwhile


@dataclass(frozen=True)
class Request:
    """A program that a fork is to become.

    Attributes:
        arguments: Arguments of `python`.
        parent: Process ID of the requesting process, which becomes the parent.
        descriptors: Numbers in the program of the descriptors that are sent along.
        dies_with_parent: Whether to call `die_with_parent`.
        starts_others: Whether the program gets its own template.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    parent: int
    descriptors: tuple[int, ...]
    new_session: bool
    dies_with_parent: bool
    starts_others: bool


class Template:
    """A process to fork, as seen by the process that becomes the parent of the forks.

    Args:
        connection: Connection to the process, which exits when it is closed.
        environment: Environment in which the process imported everything.
    """

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]):
        self._connection = connection
        self._imported_with = _read_by_imports(environment)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether imports would have had the same result in this environment."""
        return _read_by_imports(environment) == self._imported_with

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """Fork it into a child of this process, and return the process ID."""
        with _lock, _adopting_orphans():
            socket.send_fds(self._connection, [pickle.dumps(request)], list(descriptors))
            answer = self._connection.recv(64)
        if not answer:
            raise RuntimeError(f"the template was lost when it was to become {request.arguments}")
        return int(answer)


def popen(command: Sequence[str], *, starts_others: bool = False, **options: Any) -> subprocess.Popen[Any]:
    """Like `subprocess.Popen` with these options, but fork a Python program whose environment names a backend, if
    possible. Start anything else."""
    with _lock:
        template = _template_of(options.get("env") or os.environ)
        with mock.patch("subprocess._fork_exec", _Starter(template, starts_others)):
            return subprocess.Popen(command, **options)


def fork_from_now_on(template: Template) -> None:
    """Fork `template`, if it fits, for every Python program that this process starts."""
    subprocess._fork_exec = _Starter(template, starts_others=False)  # type: ignore[attr-defined]


def _template_of(environment: Mapping[str, str]) -> Template | None:
    """Return the template for the backend that an environment names. Start it on the first request."""
    backend = environment.get("KERAS_BACKEND")
    if sys.platform != "linux" or backend not in IMPORTED_BACKENDS or ON_GPU:  # CUDA's libraries must not be forked
        return None
    if backend not in _templates:
        _templates[backend] = _start_template(environment)
    return _templates[backend]


_templates: dict[str, Template] = {}
"""Templates of this process by backend."""


def _start_template(environment: Mapping[str, str]) -> Template:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.settimeout(ANSWER_BOUND_S)
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_template", str(there.fileno())],
            # One thread for NumPy: OpenBLAS starts its threads on import.
            env={
                **{
                    name: value
                    for name, value in environment.items()
                    if not name.startswith(("OMP_", "MKL_", "PHALANX_TEST_"))
                },
                "PYTHONPATH": str(ROOT),
                "OPENBLAS_NUM_THREADS": "1",
            },
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            preexec_fn=die_with_parent,
        )
    atexit.register(_end_template, here, process)
    assert here.recv(64), "the template could not import Keras"
    return Template(here, environment)


def _end_template(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.kill()
    process.wait()


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_BY_IMPORTS) and name not in READ_LATER
    }


class _Starter:
    """Replaces `_posixsubprocess.fork_exec`, which `subprocess.Popen` calls after all preparations."""

    def __init__(self, template: Template | None, starts_others: bool):
        self._template, self._starts_others = template, starts_others

    def __call__(self, *given: Any) -> int:
        names = (
            "args executables close_fds keep cwd env p2cread p2cwrite c2pread c2pwrite errread errwrite errpipe_read "
            "errpipe_write restore_signals new_session process_group gid gids uid umask preexec"
        )
        asked = dict(zip(names.split(), given, strict=False))  # before Python 3.14, allow_vfork follows
        arguments = _python_arguments(asked)
        environment = dict(os.environ)
        if asked["env"] is not None:
            environment = dict(os.fsdecode(variable).split("=", 1) for variable in asked["env"])
        if arguments is None or self._template is None or not self._template.fits(environment):
            return int(_start_process(*given))
        opened = {
            0: max(asked["p2cread"], 0),
            1: asked["c2pwrite"] if asked["c2pwrite"] >= 0 else 1,
            2: asked["errwrite"] if asked["errwrite"] >= 0 else 2,
            **{number: number for number in asked["keep"] if number != asked["errpipe_write"]},
        }
        request = Request(
            arguments,
            environment,
            os.path.join(os.getcwd(), os.fsdecode(asked["cwd"] or "")),
            os.getpid(),
            tuple(opened),
            new_session=asked["new_session"],
            dies_with_parent=asked["preexec"] is die_with_parent,
            starts_others=self._starts_others or arguments[:2] == ("-m", "phalanx"),
        )
        return int(self._template.fork(request, list(opened.values())))


def _python_arguments(asked: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the arguments after `python` on a command line that can be forked; None for any other."""
    program, *arguments = [os.fsdecode(argument) for argument in asked["args"]]
    is_program = program == sys.executable and arguments and (arguments[0] in ("-m", "-c") or arguments[0][0] != "-")
    others = (asked["gid"], asked["gids"], asked["uid"])
    is_ordinary = asked["close_fds"] and others == (None, None, None) and asked["umask"] == asked["process_group"] == -1
    return tuple(arguments) if is_program and is_ordinary and asked["preexec"] in (None, die_with_parent) else None


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    was = ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(was))
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, was.value)
