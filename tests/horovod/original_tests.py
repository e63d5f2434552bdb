"""Horovod's own tests, with only their imports changed: they must pass on two ranks.

    python -m tests.horovod.original_tests --source ../horovod test_torch -k allreduce

The tests come from a Git repository, a path or an address, and are not part of this one. Other arguments are passed to
pytest. `NOT_HERE` lists what cannot pass. The exit code is 1 if anything else fails, or if something passes that is
listed.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.outcomes import Outcomes, are_as_listed, count, read

SOURCE = "https://github.com/horovod/horovod"
COMMIT = "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a"
"""The last one at the time of writing, after Horovod 0.28.1."""

_NO_REF = "calls `variable.ref()`, which variables of Keras 3 do not have"
_COMPUTE = "calls `optimizer._compute_gradients()` of Keras 2"
_RATE = "calls `keras.optimizers.Optimizer(name=...)` without a learning rate, which Keras 3 requires"
_LR = "calls `keras.optimizers.RMSprop(lr=...)` of Keras 2"
_MUON = "takes every subclass of `torch.optim.Optimizer` for a model with biases, which PyTorch's Muon refuses"

NOT_HERE: dict[str, dict[str, str]] = {
    "test_torch": dict.fromkeys(
        ["test_broadcast_state", "test_broadcast_state_options", "test_force_allreduce"], _MUON
    ),
    "test_tensorflow": {
        "test_horovod_syncbn_cpu": "calls `tf.keras.layers.BatchNormalization(fused=False)` of Keras 2",
        "test_partial_distributed_gradient_tape": _NO_REF,
    },
    "test_tensorflow2_keras": {
        "test_broadcast_global_variables_callback_with_local_vars": _NO_REF,
        "test_grad_aggregation_with_inf_grad": _COMPUTE,
        "test_gradient_aggregation_[01]": _RATE,
        "test_gradient_aggregation_with_local_vars_[01]": _RATE,
        "test_legacy_optimizer": "`keras.optimizers.legacy` is of Keras 2",
        "test_partial_distributed_optimizer": _COMPUTE,
        "test_sparse_as_dense": _LR,
        "test_sparse_as_dense_with_grad_aggregation": _LR,
        "test_train_model_lr_schedule": "`tf.keras.losses.mean_squared_error` is of Keras 2",
    },
}
"""By file: patterns of tests that cannot pass, and why; as in `docs/migration/horovod.md`."""

_OF_INTERNALS = re.compile(r"^from horovod\.\S*\butil\S* import", re.M)
_OF_HOROVOD = re.compile(r"^( *)(import|from) horovod\b", re.M)
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "KERAS_BACKEND": "tensorflow",
    "OMP_NUM_THREADS": "1",
    "PHALANX_TIMEOUT": "60",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_TEST_S = 180
"""For one test, against hanging."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.horovod.original_tests", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--source", default=SOURCE, help="a repository of Horovod")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("files", nargs="*", metavar="FILE", default=list(NOT_HERE), help="of Horovod's test/parallel")
    options, of_pytest = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="horovod-tests-"))
    _fetch(options.source, folder)
    is_good = True
    for name in options.files:
        ranks = _run(name, options.workers, of_pytest, folder)
        print(f"{name}, {options.workers} workers: {count(ranks['0'])}", flush=True)
        failed = {test: error for test in ranks["0"] if (error := _error(test, ranks))}
        expected = {
            test
            for test, outcome in ranks["0"].items()
            if outcome != "skipped" and any(fnmatch.fnmatchcase(test, pattern) for pattern in NOT_HERE.get(name, {}))
        }
        is_good &= bool(ranks["0"]) and are_as_listed(failed, expected)
    print(f"all output is in {folder}")
    return 0 if is_good else 1


def _fetch(source: str, folder: Path) -> None:
    """Horovod's tests, which import Phalanx instead."""
    git = ["git", "-C", str(folder)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "fetch", "--quiet", "--depth", "1", source, COMMIT], check=True)
    subprocess.run([*git, "checkout", "--quiet", "FETCH_HEAD", "--", "test/parallel", "test/utils"], check=True)
    for path in folder.glob("test/*/*.py"):
        text = _OF_INTERNALS.sub("from tests.horovod.horovod_internals import", path.read_text())
        path.write_text(_OF_HOROVOD.sub(r"\1\2 phalanx.horovod", text))


def _run(name: str, workers: int, of_pytest: list[str], folder: Path) -> dict[str, Outcomes]:
    """The outcomes on each rank."""
    written = folder / name
    written.mkdir()
    job = ["-m", "phalanx", "run", "-n", str(workers), "-m", "pytest", "-p", "tests.horovod.original_outcomes"]
    command = [sys.executable, *job, f"--outcomes={written}", "-c", os.devnull, "-p", "no:cacheprovider", "-v"]
    command += [f"--timeout={_TEST_S}", "-o", "addopts=", str(folder / "test" / "parallel" / f"{name}.py"), *of_pytest]
    log = folder / f"{name}.log"
    with log.open("w") as output:
        subprocess.run(command, env={**os.environ, **_ENVIRONMENT}, stdout=output, stderr=output, check=False)
    return read(written, map(str, range(workers)), log)


def _error(test: str, ranks: dict[str, Outcomes]) -> str:
    """Why a test does not pass on a rank; empty if it does."""
    errors = [outcomes.get(test, "did not run") for outcomes in ranks.values()]
    return next((error for error in errors if error not in ("passed", "skipped")), "")


if __name__ == "__main__":
    sys.exit(main())
