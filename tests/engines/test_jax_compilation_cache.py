"""What JAX compiles is kept between processes, whole or not at all, and not where the user has decided otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jax

PROGRAM = """
import runpy
from pathlib import Path

import jax
import phalanx

# By its path, without the package around it, which would import Keras.
runpy.run_path(str(Path(phalanx.__file__).parent / "engines" / "replica" / "jax" / "compilation_cache.py"))["install"]()
compiled = []
jax.monitoring.register_event_listener(lambda event, **_: compiled.append(event))
print(jax.jit(lambda x: 2 * x)(21.0))
print("hits", compiled.count("/jax/compilation_cache/cache_hits"))
print("folder", jax.config.jax_compilation_cache_dir)
"""


def run(home: Path, **environment: str) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**own, "XDG_CACHE_HOME": str(home), "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "42.0" in done.stdout
    assert "Error" not in done.stderr, done.stderr
    return done.stdout


def entries(home: Path) -> list[Path]:
    return sorted(home.glob("phalanx/jax/*/*"))


def test_a_second_process_finds_what_the_first_compiled_whole_and_old_entries_go(tmp_path: Path) -> None:
    """Old are those that no process has used for a month. What a killed process has half written is not read."""
    assert "hits 0" in run(tmp_path)
    found = entries(tmp_path)
    assert found
    assert all(path.name.endswith("-cache") for path in found)
    old = found[0].with_name("old-cache")
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    assert f"hits {len(found)}" in run(tmp_path)
    assert entries(tmp_path) == found
    (entry,) = found
    entry.rename(entry.with_name(f"{entry.name.removesuffix('-cache')}.1234.partial"))
    assert "hits 0" in run(tmp_path)
    assert entry.exists()


@pytest.mark.parametrize(
    "decision",
    [
        {"JAX_COMPILATION_CACHE_DIR": ""},
        pytest.param({"JAX_ENABLE_COMPILATION_CACHE": "false"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_users_own_decision_holds(tmp_path: Path, decision: dict[str, str]) -> None:
    run(tmp_path, **decision)
    assert entries(tmp_path) == []


def test_a_home_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    obstacle = tmp_path / "file"
    obstacle.write_text("")
    assert "hits 0" in run(obstacle)
