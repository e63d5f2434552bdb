"""What is published: a wheel that installs into an empty environment and runs the README's program there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Downloads of Keras and a backend; a slow mirror may take most of it.
INSTALL_BOUND_S = 900.0
JOB_BOUND_S = 300.0


def run(*command: str | Path, timeout_s: float, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(int(2 * INSTALL_BOUND_S + JOB_BOUND_S))
def test_the_wheel_runs_the_program_of_the_readme_in_an_empty_environment(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    command = re.search(r"^    phalanx (run .*)$", readme, re.MULTILINE)
    assert program is not None
    assert command is not None

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT, timeout_s=INSTALL_BOUND_S)
    (wheel,) = tmp_path.glob("phalanx-*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    binaries = tmp_path / "empty" / "bin"
    # Without what the user's own environment adds to every interpreter.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KERAS"))}
    install = (binaries / "python", "-m", "pip", "install", "-q", f"{wheel}[jax]", "scikit-learn")
    run(*install, timeout_s=INSTALL_BOUND_S, env=environment)
    (tmp_path / "train.py").write_text(program[1])
    words = shlex.split(command[1])
    said = run(binaries / "phalanx", *words, timeout_s=JOB_BOUND_S, cwd=tmp_path, env=environment)
    assert "phalanx: starting 2 workers" in said
    assert "Epoch 5/5" in said
    assert "val_accuracy" in said
