"""Reports the trials and choices of autotuning."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from phalanx.collectives.autotune.trial_search import TrialSearch

_log = logging.getLogger(__name__)


class AutotuneLog:
    """Writes the results of searches to the program's log and to a tab-separated file.

    Args:
        path: File to write; None for the program's log only.
        append: Whether to keep the existing contents of the file, instead of starting it with a header line.
    """

    def __init__(self, path: Path | None, *, append: bool = False):
        self._path = path
        if not append:
            self._write("what\tplan\tms\n", "w")

    def report(self, subject: str, search: TrialSearch[Any]) -> None:
        """Report a finished search.

        Args:
            subject: Subject of the search, for example `all-reduce of 1 MiB`.
        """
        rows = [f"{subject}\t{result.plan}\t{result.cost * 1e3:.3g}\n" for result in search.results]
        self._write("".join([*rows, f"{subject}\tchosen: {search.choice}\t\n"]), "a")
        _log.info("autotune: %s uses %s", subject, search.choice)

    def _write(self, text: str, mode: str) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, mode) as file:
                file.write(text)
        except OSError as error:
            _log.warning("cannot write the autotune log %s: %s", self._path, error)
            self._path = None
