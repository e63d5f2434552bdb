from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import ConfigurationError
from phalanx.launcher.worker_program import Program, check_script, parse_command


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python train.py --lr 1", Program(("train.py", "--lr", "1"))),
        ("python -O -X dev train.py", Program(("train.py",), ("-O", "-X", "dev"))),
        ("python -Xdev -W error t.py -c x", Program(("t.py", "-c", "x"), ("-Xdev", "-W", "error"))),
        ("python -m project.train -v", Program(("-m", "project.train", "-v"))),
        ("python -mproject", Program(("-m", "project"))),
        ("python -Bm project", Program(("-m", "project"), ("-B",))),
        ("python -c print(1) a", Program(("-c", "print(1)", "a"))),
        ("python -uIc code", Program(("-c", "code"), ("-uI",))),
        ("python --check-hash-based-pycs x t.py", Program(("t.py",), ("--check-hash-based-pycs", "x"))),
        ("python -- train.py", Program(("train.py",))),
    ],
)  # fmt: skip
def test_the_program_is_found_behind_the_interpreters_options(command: str, program: Program) -> None:
    assert parse_command(command.split()) == program


@pytest.mark.parametrize("command", ["python", "python -i", "python -i train.py", "python -", "python -q", "python --"])
def test_an_interactive_session_is_no_program(command: str) -> None:
    assert parse_command(command.split()) is None


def test_a_script_that_is_not_there_is_an_error_that_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no script nowhere.py \(looked in "):
        check_script("nowhere.py")
    with pytest.raises(ConfigurationError, match=r"without __main__.py"):
        check_script(str(tmp_path))
    (tmp_path / "__main__.py").touch()
    check_script(str(tmp_path))
