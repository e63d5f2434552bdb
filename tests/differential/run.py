"""The differential search: random Keras programs on plain Keras and on replicas.

    python -m tests.differential.run --minutes 60 --backend torch --seed 7

Prints the number of programs, those that were refused by reason, and for each difference, and each refusal without
need, a script that shows it. The exit code is 1 if there was one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.support import compilation

ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    **compilation.SHARED,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.differential.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--backend", default="jax")
    parser.add_argument("--minutes", type=float, default=10.0, help="no program starts after so many minutes")
    parser.add_argument("--programs", type=int, default=10**9, help="so many programs at most")
    parser.add_argument("--seed", type=int, default=1, help="of the first hundred programs; the next have the next one")
    parser.add_argument("--shrink", type=float, default=120.0, help="seconds for making a failing program smaller")
    parser.add_argument("--folder", type=Path, help="for the scripts of findings; else a temporary one")
    parser.add_argument("--verbose", action="store_true", help="a line and a script for each program")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="differential-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update({"KERAS_BACKEND": options.backend, **ENVIRONMENT, **compilation.cheap(options.backend)})
    os.environ[compilation.FOLDER] = str(folder / "compiled")

    import warnings

    warnings.filterwarnings("ignore", message=r"os\.fork\(\)")
    from phalanx.keras_compat import lazy_imports

    lazy_imports.install()  # in plain Keras as well: it changes only when things are imported
    from tests.differential.pool import Pool
    from tests.differential.programs import Program
    from tests.differential.search import Different, search

    numbers = itertools.count(1)

    def progress(program: Program, verdict: str, seconds: float) -> None:
        path = folder / f"{options.backend}-{next(numbers)}.py"
        path.write_text(program.script(verdict))
        print(f"{seconds:.1f} s, {program.world_size} replicas: {verdict}: {path}", flush=True)

    def report(program: Program, failure: Different) -> None:
        title = f"{failure.kind}\n\n{failure}".replace('"""', "'''").replace("\\", "/")
        path = folder / f"{options.backend}-{abs(hash(program)) % 10**6:06}.py"
        path.write_text(program.script(title))
        for number, source in enumerate(failure.before):
            path.with_suffix(f".{number}-before.py").write_text(source)
        print(f"FOUND {failure.kind}\n{failure}\n  script: {path}\n{program.source}", flush=True)

    gc.freeze()  # what is imported is not looked through again by the processes that are forked, after each program
    began = time.monotonic()
    pool = Pool(Path(tempfile.mkdtemp(prefix="programs-", dir=folder)))
    try:
        tally = search(
            pool,
            options.backend,
            seed=options.seed,
            examples=options.programs,
            until=began + 60 * options.minutes,
            report=report,
            shrink_s=options.shrink,
            progress=progress if options.verbose else None,
        )
    finally:
        pool.close()
    print(f"{options.backend}, seed {options.seed}, {time.monotonic() - began:.0f} s, scripts in {folder}\n{tally}")
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
