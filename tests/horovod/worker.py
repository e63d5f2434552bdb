"""The program of one rank: calls the cases of a module in turn and writes down how each ended.

phalanx run -np 2 -m tests.horovod.worker numpy FOLDER CASE...
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

import pytest

SKIPPED = "skipped:"
"""What a case writes down that cannot be run here, before the reason."""


def main(framework: str, folder: Path, names: list[str]) -> None:
    if framework == "tensorflow":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    cases = importlib.import_module(f"tests.horovod.cases.{framework}")
    from phalanx.horovod import object_collectives
    from phalanx.horovod.horovod_job import current_job

    cases.hvd.init()
    for name in names:
        try:
            getattr(cases, name)()
            text = ""
        except pytest.skip.Exception as skipped:
            text = f"{SKIPPED} {skipped}"
        except BaseException:
            text = traceback.format_exc()
        (folder / f"{name}.{current_job().membership.rank}").write_text(text)
        # Who alone failed in the middle of a case may be out of step with the others.
        if len(set(object_collectives.allgather_object(bool(text), name=f"case.{name}"))) > 1:
            return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
