"""Runs the programs of documentation pages, one after the other, in the workers of one job.

    phalanx run --workers 2 -m tests.examples.page_runner FOLDER NAME...

Each FOLDER/NAME.py runs in an empty folder that all workers share, in a namespace of its own. Beside it, NAME.RANK says
`ok`; a program that fails ends the job.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import phalanx


def main(folder: Path, names: list[str]) -> None:
    strategy = phalanx.MultiWorkerMirroredStrategy()
    for name in names:
        work = folder / f"{name}.files"
        work.mkdir(exist_ok=True)
        os.chdir(work)
        runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
        (folder / f"{name}.{strategy.rank}").write_text("ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
