"""Keras's own tests, in the scope of a strategy: what passes in plain Keras must pass on replicas.

    python -m tests.differential.keras_tests --backend torch --workers 1 2 -k steps_per_execution

The tests are those of the installed Keras, which come with it. Other arguments are passed to pytest. `NOT_ON_REPLICAS`
lists what cannot pass. The exit code is 1 if anything else fails, or if something passes that is listed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.differential.run import ENVIRONMENT
from tests.support import compilation

PLAIN = "plain"
"""Stands for a rank where there is no strategy."""
TRAINER_TEST = "keras.src.trainers.trainer_test"
_RETRACING = {"test_retracing": "counts calls of train_step, which the trial of a custom step calls as well"}
NOT_ON_REPLICAS: dict[str, dict[str, str]] = {
    "jax": _RETRACING,
    "tensorflow": _RETRACING
    | {
        "test_fit_sparse_*": "sees IndexedSlices in the optimizer; the merged gradient of a dense layer is dense",
        "test_trainer_with_raggeds_*": "ragged tensors are refused: a strategy divides dense arrays",
    },
    "torch": {},
}
"""By backend: patterns of tests that fail with several replicas, and why; as in `docs/concepts/numbers.md`."""

Outcomes = dict[str, str]
"""By test: "passed", "skipped" or the error."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.differential.keras_tests", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--backend", default="jax")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="sizes of the jobs")
    parser.add_argument("--tests", default=TRAINER_TEST, help="a module of Keras, or the path of a file")
    options, of_pytest = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="keras-tests-"))
    plain = _run(options.backend, 0, options.tests, of_pytest, folder)[PLAIN]
    print(f"{options.backend}, plain Keras: {_counts(plain)}", flush=True)
    is_good = bool(plain)
    for workers in options.workers:
        ranks = _run(options.backend, workers, options.tests, of_pytest, folder)
        failed = {name: error for name in plain if (error := _error(name, plain, ranks))}
        print(f"{options.backend}, {workers} workers: {_counts(ranks['0'])}", flush=True)
        listed = NOT_ON_REPLICAS[options.backend] if workers > 1 else {}
        expected = {
            name
            for name, outcome in plain.items()
            if outcome == "passed" and any(fnmatch.fnmatchcase(name, pattern) for pattern in listed)
        }
        for name, error in failed.items():
            print(f"  {'expected' if name in expected else 'FAILED'}: {name}: {error.strip().splitlines()[0][:300]}")
        for name in expected - set(failed):
            print(f"  PASSED, though it is listed: {name}")
        is_good &= set(failed) == expected
    print(f"all output is in {folder}")
    return 0 if is_good else 1


def _run(backend: str, workers: int, tests: str, of_pytest: list[str], folder: Path) -> dict[str, Outcomes]:
    """The outcomes on each rank of a job of so many workers; with none, in plain Keras."""
    written = folder / str(workers)
    written.mkdir()
    job = ["-m", "phalanx", "run", "-n", str(workers)] if workers else []
    command = [sys.executable, *job, "-m", "pytest", "-p", "tests.differential.in_scope", f"--outcomes={written}"]
    command += ["-o", "addopts=", "-p", "no:cacheprovider", *([] if workers else ["--plain"])]
    command += [*([] if tests.endswith(".py") else ["--pyargs"]), tests, *of_pytest]
    with (folder / f"{workers}.log").open("w") as log:
        variables = {**os.environ, **ENVIRONMENT, **compilation.cheap(backend), "KERAS_BACKEND": backend}
        subprocess.run(command, env=variables, stdout=log, stderr=log, check=False)
    found = {file.stem: json.loads(file.read_text()) for file in written.glob("*.json")}
    if missing := {str(rank) for rank in range(workers)} - set(found):
        sys.exit(f"ranks {sorted(missing)} did not finish:\n{(folder / f'{workers}.log').read_text()[-3000:]}")
    return found


def _error(name: str, plain: Outcomes, ranks: dict[str, Outcomes]) -> str:
    """Why a test that passes in plain Keras does not pass on a rank."""
    errors = [outcomes.get(name, "did not run") for outcomes in ranks.values()]
    return next((error for error in errors if error != "passed"), "") if plain[name] == "passed" else ""


def _counts(outcomes: Outcomes) -> str:
    passed, skipped = (list(outcomes.values()).count(kind) for kind in ("passed", "skipped"))
    return f"{passed} passed, {skipped} skipped, {len(outcomes) - passed - skipped} failed"


if __name__ == "__main__":
    sys.exit(main())
