"""Draws all pictures: `make pictures`. The jobs that they show run on this machine and take a minute."""

from __future__ import annotations

import tempfile
from pathlib import Path

from scripts.pictures import architecture, killed_worker, step_timeline, terminal
from scripts.pictures.recorded_job import kill_a_worker, run_job

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def main() -> None:
    (IMAGES / "architecture.svg").write_text(architecture.draw())
    with tempfile.TemporaryDirectory() as folder:
        run_job(Path(folder), ["--workers", "2", "--timeline-filename", "t.json"], epochs=3)
        (IMAGES / "step-timeline.svg").write_text(step_timeline.draw(Path(folder) / "t.json"))
    with tempfile.TemporaryDirectory() as folder:
        shown = run_job(Path(folder), ["--workers", "2:3"], epochs=6, watch=kill_a_worker("worker/1", at_epoch=1))
        (IMAGES / "killed-worker.svg").write_text(killed_worker.draw(Path(folder) / "log"))
        picture = terminal.draw("phalanx run --workers 2:3 --log-dir log train.py", shown, "phalanx")
        (IMAGES / "terminal.svg").write_text(picture)


if __name__ == "__main__":
    main()
