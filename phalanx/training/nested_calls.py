"""Model methods that are called while another one runs: by callbacks, or by the program's data."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.data.rank_local_reads import rank_local_data
from phalanx.errors import UnsupportedError
from phalanx.training.chief_callbacks import outside_of_hooks
from phalanx.training.replica import Replica


@contextmanager
def collective_method(replica: Replica, name: str) -> Iterator[None]:
    """Run a method of a model on all ranks inside the context: each in one thread, and in the same order.

    Raises: UnsupportedError if the other ranks may not call it, or another thread is in one.
    """
    thread, former = threading.get_ident(), replica.calling_thread
    problem = None
    if os.getpid() != replica.process:
        problem = "in a process that a replica has started, as workers of a DataLoader or PyDataset are"
    elif former not in (None, thread):
        problem = "in a thread, while another one of this process runs such a method (workers of a PyDataset, tf.data)"
    elif kind := rank_local_data():
        problem = f"while this replica reads data ({kind}) that the others do not read"
    if problem is not None:
        raise UnsupportedError(
            f"{name}() was called {problem}. All replicas take part in it, in the same order as in all else. Call it "
            f"before, or where every replica reads all batches in one thread (a generator, a PyDataset with "
            f"workers=1); or make the called model outside of the strategy's scope."
        )
    replica.calling_thread = thread
    try:
        with outside_of_hooks():
            yield
    finally:
        replica.calling_thread = former
