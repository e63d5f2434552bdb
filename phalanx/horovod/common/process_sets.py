"""`from phalanx.horovod.common.process_sets import ProcessSet`, as programs for Horovod write it."""

from __future__ import annotations

from phalanx.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)

__all__ = [
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "remove_process_set",
]
