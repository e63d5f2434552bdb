"""Warns about training that no strategy distributes, in a job of several workers.

Each worker then trains its own model on all of the data and writes the same files. Nothing else would reveal this.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from phalanx.runtime.first_worker import has_servers, worker_count_if_first

logger = logging.getLogger(__name__)

OWNER = "_phalanx_owner"
"""Attribute of a model that belongs to a strategy."""
HOROVOD = ("phalanx.horovod.horovod_job", "horovod")
"""Modules imported by programs that use Horovod's interface, whose models belong to no strategy."""
CLUSTER = "phalanx.cluster"
"""Package imported by everything that joins a job."""

_is_watching = False
_has_warned = False


def watch_fit() -> None:
    """Start warning, if the program has imported Keras 3. Safe to call twice."""
    global _is_watching
    if hasattr(sys.modules.get("keras"), "distribution") and not _is_watching:
        from phalanx.keras_compat.fit_observer import observe_fit

        _is_watching = True
        observe_fit(_warn_if_undistributed)


def _warn_if_undistributed(model: Any, method: str) -> None:
    """Warn once, on the first of several workers."""
    global _has_warned
    if _has_warned or OWNER in vars(model) or not sys.modules.keys().isdisjoint(HOROVOD):
        return
    workers = _count_undistributed_workers()
    if workers:
        _has_warned = True
        logger.warning(
            "%s() of %r: the model belongs to no strategy, so each of the %d workers that calls this trains its own "
            "copy of it. To train one model together, create and compile it in the scope of a strategy, such as "
            "phalanx.MultiWorkerMirroredStrategy().",
            method,
            model.name,
            workers,
        )


def warn_at_the_end() -> None:
    """Warn at the end of a program that used Keras, perhaps in a custom training loop, but joined no job."""
    if _has_warned or not hasattr(sys.modules.get("keras"), "distribution"):
        return
    if any(name.startswith(CLUSTER) for name in sys.modules):
        return
    workers = _count_undistributed_workers()
    if workers:
        logger.warning(
            "The program has created no strategy, so its %d workers did not train together: each ran all of it by "
            "itself. See phalanx.MultiWorkerMirroredStrategy and phalanx.horovod.",
            workers,
        )


def _count_undistributed_workers() -> int:
    """Number of workers if there are several, this is the first one, and nothing distributes their work; otherwise 0.

    Also 0 with parameter servers: their workers call functions that may train anything.
    """
    workers = worker_count_if_first()
    return workers if workers > 1 and not has_servers() and not _has_other_distribution() else 0


def _has_other_distribution() -> bool:
    """Whether Keras or PyTorch is configured to distribute the training itself."""
    import keras

    # A PyTorch build without distribution has the module, but not the function.
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return keras.distribution.distribution() is not None or (is_initialized is not None and is_initialized())
