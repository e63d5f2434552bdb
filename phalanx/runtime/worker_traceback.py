"""The traceback of an error that another process raised."""

from __future__ import annotations


class WorkerTraceback(Exception):
    """The traceback of an error in the worker that raised it: the `__cause__` of the error raised here."""

    def __init__(self, task: str, traceback: str):
        super().__init__(task, traceback)
        self.task = task
        self.traceback = traceback

    def __str__(self) -> str:
        return f"in {self.task}:\n\n{self.traceback}"
