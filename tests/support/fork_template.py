"""The process that is forked instead of starting Python; see `fork_server`.

    python -m tests.support.fork_template FD

imports what the programs of tests use, and answers requests from the socket FD until it is closed. Each fork becomes
the requested program.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import NoReturn

import phalanx
from phalanx.keras_compat import lazy_imports
from phalanx.runtime import bootstrap
from tests.support.commands import ROOT, die_with_parent
from tests.support.fork_server import MAX_DESCRIPTORS, MAX_REQUEST_BYTES, Request, Template, fork_from_now_on

ADOPTION_BOUND_S = 30.0

MODULES = "numpy keras msgspec pytest concurrent.futures.thread tests.support.seeds"
MODULES_OF = {
    "jax": "jax jax.experimental.multihost_utils jaxlib.mlir.dialects.mhlo scipy.linalg",
    "tensorflow": "tensorflow",
    "torch": "torch torch.utils.data keras.src.backend.torch.trainer",
}
UNNAMED_USERS_OF = {"tensorflow": ["tf_data_"], "torch": ["dataloader_", "pinned_memory"]}
"""Parts of the names of modules that import a backend without naming it."""


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    started_with = dict(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal; the process that started this one ends it
    _import_all(os.environ["KERAS_BACKEND"])
    # A fork has only its own thread and would wait for the others.
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started threads"
    gc.collect()
    gc.freeze()  # otherwise, the first collection in a fork would write to, and so copy, every page
    connection.send(b"imported")
    while True:
        request, descriptors = _serve(connection)
        _await_parent(request.parent)
        if request.new_session:
            os.setsid()
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if request.starts_others and _fork() == 0:  # the program's own template, in the current state of this process
            die_with_parent()
            connection.detach()
            connection = there
            _close_all_but({0, 1, 2, here.detach(), connection.fileno()})
        else:
            connection.detach()
            there.detach()
            _become(request, descriptors, here, started_with)


def _import_all(backend: str) -> None:
    """Import what programs on this backend use, but no other backend."""
    lazy_imports.install()
    for name in f"{MODULES} {MODULES_OF[backend]}".split():
        importlib.import_module(name)
    others = MODULES_OF.keys() - {backend}
    present = others & sys.modules.keys()  # Keras on PyTorch imports JAX
    # Importing `phalanx.compat.v1` disables TensorFlow 2.
    unwanted = {
        "__main__",
        "horovod",
        "compat.v1",
        *others,
        *(name for other in others for name in UNNAMED_USERS_OF.get(other, [])),
    }
    for path in sorted((ROOT / "phalanx").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not any(part in name for part in unwanted):
            importlib.import_module(name)
            assert others & sys.modules.keys() == present, f"{name} has imported another backend than {backend}"
    # `import phalanx` alone imports none of these; the first use does (`phalanx.__getattr__`).
    for name in phalanx.__all__:
        vars(phalanx).pop(name, None)


def _serve(connection: socket.socket) -> tuple[Request, list[int]]:
    """Answer requests until there are no more. Returns only in forks, with the program that they are to become."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        middle = _fork()
        if middle == 0:
            child = _fork()
            if child == 0:
                return pickle.loads(message), descriptors
            os.write(writer, str(child).encode())
            os._exit(0)
        os.waitpid(middle, 0)  # the child has its new parent from here on
        connection.send(os.read(reader, 64))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns, because it expects threads in any process that imports it
        return os.fork()


def _become(
    request: Request, received: list[int], template: socket.socket, started_with: Mapping[str, str]
) -> NoReturn:
    """Do what `Popen` does between its fork and the start of a program, then what the interpreter does."""
    template = _take_descriptors(request, received, template)
    if request.dies_with_parent:
        die_with_parent()
    os.chdir(request.folder)
    set_by_imports = {name: value for name, value in os.environ.items() if started_with.get(name) != value}
    os.environ.clear()
    os.environ.update({**set_by_imports, **request.environment})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_streams()
    # The first entry is the folder of the script, which `run_program` enters.
    own = 1 + len(started_with["PYTHONPATH"].split(os.pathsep))
    sys.path[:] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[own:]]
    importlib.invalidate_caches()
    sys.orig_argv[:] = [sys.executable, *request.arguments]
    sys.argv[:] = list(request.arguments)
    sys.excepthook = sys.__excepthook__
    _apply_variables()
    if request.starts_others:
        fork_from_now_on(Template(template, os.environ))
    _run(request.arguments)


def _await_parent(parent: int) -> None:
    until = time.monotonic() + ADOPTION_BOUND_S
    while os.getppid() != parent:
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(0.0002)


def _take_descriptors(request: Request, received: list[int], template: socket.socket) -> socket.socket:
    """Give the program its descriptors under the expected numbers, and no others. Return the moved `template`."""
    above = max(request.descriptors) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in received]
    connection = fcntl.fcntl(template.detach(), fcntl.F_DUPFD_CLOEXEC, above)
    _close_all_but({connection, *moved})
    for source, number in zip(moved, request.descriptors, strict=True):
        os.dup2(source, number)
        os.close(source)
    if not request.starts_others:
        os.close(connection)
        return template
    return socket.socket(fileno=connection)


def _close_all_but(kept: set[int]) -> None:
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.close(number)


def _open_streams() -> None:
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        is_raw = is_unbuffered and number > 0
        buffer = raw if is_raw else (io.BufferedWriter(raw) if number else io.BufferedReader(raw))
        stream = io.TextIOWrapper(
            buffer,  # type: ignore[arg-type]  # as in the interpreter itself
            encoding=old.encoding,
            errors=old.errors,
            newline="\n" if number else None,
            line_buffering=not is_unbuffered and (number == 2 or raw.isatty()),
            write_through=is_raw,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _apply_variables() -> None:
    """Apply what modules would have read or drawn during their import."""
    sys.modules["numpy"].random.seed()
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR"))


def _run(arguments: Sequence[str]) -> NoReturn:
    """Run the program, and exit as the interpreter would, but without tearing it down. That takes half a second,
    because it writes to, and so copies, every page of the template."""
    code = 0
    try:
        bootstrap.run_program(list(arguments))
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:
        code = 1
        _show(error)
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    _end(code)


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Show an error like an uncaught one, without the frames of this file and of `run_program`."""
    stack = error.__traceback__
    while stack is not None and stack.tb_frame.f_code in (_run.__code__, bootstrap.run_program.__code__):
        stack = stack.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, stack
    sys.excepthook(type(error), error.with_traceback(stack), stack)


def _end(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for each in gc.get_objects():  # files that the program has left open
        if isinstance(each, (io.TextIOWrapper, io.BufferedWriter)):
            with contextlib.suppress(Exception):  # already closed, or without a reader
                each.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
