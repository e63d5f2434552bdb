"""The documentation says what is so: its programs run, its links lead somewhere, its commands work as written."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, JOB_BOUND_S, environment
from tests.examples.pages import Program, pages, programs, shell_blocks
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import finish

pytestmark = pytest.mark.timeout(700)

PAGES = pages()
PROGRAMS = [program for page in PAGES for program in programs(page)]
IN_ONE_JOB = [program for program in PROGRAMS if program.command is None]
WITH_COMMAND = [program for program in PROGRAMS if program.command is not None]
BY_HAND = EXAMPLES / "multi_worker_by_hand.md"

RunPages = Callable[[str], Path]


def backend_of(program: Program) -> str:
    return program.backend or FIRST


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> RunPages:
    """`ran(backend)`: the folder with what became of all selected programs for that backend; one job runs them."""
    selected = [item.callspec.params["program"] for item in request.session.items if "program" in _parameters(item)]
    folders: dict[str, Path] = {}

    def ran(backend: str) -> Path:
        if backend not in folders:
            folder = folders[backend] = tmp_path_factory.mktemp(f"pages-{backend}")
            names = [program.name for program in selected if backend_of(program) == backend and program.command is None]
            for program in selected:
                (folder / f"{program.name}.py").write_text(program.code)
            command = ["phalanx", "run", "--workers", "2", "-m", "tests.examples.page_runner", str(folder), *names]
            _, output = finish(["python", "-m", *command], environment(backend), bound_s=JOB_BOUND_S)
            (folder / "output").write_text(output)
        return folders[backend]

    return ran


def _parameters(item: pytest.Item) -> dict[str, object]:
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.mark.slow
@pytest.mark.parametrize("program", IN_ONE_JOB, ids=lambda program: program.name)
def test_a_page_runs_as_written_on_two_replicas(program: Program, ran: RunPages) -> None:
    skip_without(backend_of(program))
    folder = ran(backend_of(program))
    for rank in range(2):
        assert (folder / f"{program.name}.{rank}").exists(), (
            f"rank {rank} did not finish {program.name}, or a page before it failed:\n{(folder / 'output').read_text()}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("program", WITH_COMMAND, ids=lambda program: program.name)
def test_a_program_runs_as_written_with_its_command(program: Program, tmp_path: Path) -> None:
    skip_without(backend_of(program), *program.needs)
    assert program.command is not None
    (tmp_path / "program.py").write_text(program.code)
    prefix = ["python", "-m"] if program.command.startswith("phalanx") else []
    command = [*prefix, *shlex.split(program.command), "program.py"]
    code, output = finish(command, environment(backend_of(program)), folder=tmp_path, bound_s=JOB_BOUND_S)
    assert code == 0, output


def skip_without(backend: str, *modules: str) -> None:
    if backend not in BACKENDS:
        pytest.skip(f"BACKENDS leaves out {backend}")
    for module in (backend, *modules):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize("page", [*PAGES, BY_HAND], ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not link.startswith(("http:", "https:")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.slow
@pytest.mark.parametrize("machines", ["one machine", "two machines"])
def test_two_workers_by_hand_as_written(machines: str, tmp_path: Path) -> None:
    """The commands of each pair of terminals, with ports that are free and with addresses of this host."""
    blocks = shell_blocks(BY_HAND)
    assert len(blocks) == 4
    terminals = blocks[:2] if machines == "one machine" else blocks[2:]
    (tmp_path / "examples").symlink_to(EXAMPLES)
    written = sorted(set(re.findall(r"[\d.]+:\d{4,5}", " ".join(terminals))))
    # Free for now; nothing keeps them so, since the page's own command must open them.
    addresses = dict(zip(written, free_addresses(len(written)), strict=True))
    with ExitStack() as stack:
        processes = []
        for terminal in terminals:
            for address, replacement in addresses.items():
                terminal = terminal.replace(address, replacement)
            terminal = terminal.replace("digits.py", "digits.py --epochs 2 --verbose 0")
            process = subprocess.Popen(
                ["bash", "-euc", terminal],
                cwd=tmp_path,
                env={**environment(FIRST), "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            stack.callback(end, process)
            processes.append(process)
        chief, other = (process.communicate(timeout=JOB_BOUND_S)[0] for process in processes)
        assert [process.returncode for process in processes] == [0, 0], chief + other
    assert "2 replica(s)" in chief
    assert "test accuracy" in chief
    assert "test accuracy" not in other, "only the chief prints"


def free_addresses(count: int) -> list[str]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]


def end(process: subprocess.Popen[str]) -> None:
    """End what a terminal started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_the_readme_of_the_examples_names_them_all() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".md") and path.name != "README.md":
            assert path.name in readme, f"examples/README.md does not name {path.name}"
