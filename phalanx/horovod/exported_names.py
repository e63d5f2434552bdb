"""The names that the interfaces of all frameworks export."""

from __future__ import annotations

from phalanx.horovod import basics
from phalanx.horovod.basics import *  # noqa: F403
from phalanx.horovod.common.exceptions import HorovodInternalError
from phalanx.horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from phalanx.horovod.object_collectives import allgather_object, broadcast_object
from phalanx.horovod.operations import Adasum, Average, Max, Min, Product, Sum
from phalanx.horovod.run_function import run

__all__ = [
    *basics.__all__,
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "global_process_set",
    "remove_process_set",
    "run",
]
