"""Keras's own tests, in the scope of a strategy: what passes in plain Keras must pass on replicas.

    python -m tests.differential.keras_tests --backend torch --workers 1 2 -k steps_per_execution

The tests are those of the installed Keras, which come with it. Other arguments are passed to pytest. `NOT_ON_REPLICAS`
lists what cannot pass. The exit code is 1 if anything else fails, or if something passes that is listed.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.differential.run import ENVIRONMENT
from tests.support import compilation
from tests.support.outcomes import Outcomes, are_as_listed, count, read

PLAIN = "plain"
"""Stands for a rank where there is no strategy."""
TRAINER_TEST = "keras.src.trainers.trainer_test"
_RETRACING = {"test_retracing*": "counts calls of the model's own step, which the trial of a custom step calls as well"}
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
    print(f"{options.backend}, plain Keras: {count(plain)}", flush=True)
    is_good = bool(plain)
    for workers in options.workers:
        ranks = _run(options.backend, workers, options.tests, of_pytest, folder)
        failed = {name: error for name in plain if (error := _error(name, plain, ranks))}
        print(f"{options.backend}, {workers} workers: {count(ranks['0'])}", flush=True)
        listed = NOT_ON_REPLICAS[options.backend] if workers > 1 else {}
        expected = {
            name
            for name, outcome in plain.items()
            if outcome == "passed" and any(fnmatch.fnmatchcase(name, pattern) for pattern in listed)
        }
        is_good &= are_as_listed(failed, expected)
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
    log = folder / f"{workers}.log"
    with log.open("w") as output:
        variables = {**os.environ, **ENVIRONMENT, **compilation.cheap(backend), "KERAS_BACKEND": backend}
        subprocess.run(command, env=variables, stdout=output, stderr=output, check=False)
    return read(written, map(str, range(workers)), log)


def _error(name: str, plain: Outcomes, ranks: dict[str, Outcomes]) -> str:
    """Why a test that passes in plain Keras does not pass on a rank."""
    errors = [outcomes.get(name, "did not run") for outcomes in ranks.values()]
    return next((error for error in errors if error != "passed"), "") if plain[name] == "passed" else ""


if __name__ == "__main__":
    sys.exit(main())
