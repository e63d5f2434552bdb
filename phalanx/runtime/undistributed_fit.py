"""Warns of training that no strategy distributes, in a job of several workers.

Each worker then trains a model of its own, on all of the data, and writes the same files; nothing else would say so.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import TF_CONFIG
from phalanx.config.task_names import trains

logger = logging.getLogger(__name__)

OWNER = "_phalanx_owner"
"""The attribute of a model that belongs to a strategy."""
HOROVOD = ("phalanx.horovod.horovod_job", "horovod")
"""Imported by programs that use Horovod's interface, whose models belong to no strategy."""
CLUSTER = "phalanx.cluster"
"""Imported by all that joins a job."""

_is_watching = False
_has_warned = False


def watch_fit() -> None:
    """Warn from now on, if the program has imported Keras 3. Safe to call twice."""
    global _is_watching
    if hasattr(sys.modules.get("keras"), "distribution") and not _is_watching:
        from phalanx.keras_compat.fit_observer import observe_fit

        _is_watching = True
        observe_fit(_warn_if_undistributed)


def _warn_if_undistributed(model: Any, method: str) -> None:
    """Warn once, on the first of several workers."""
    global _has_warned
    if _has_warned or OWNER in vars(model) or not sys.modules.keys().isdisjoint(HOROVOD) or _has_other_distribution():
        return
    workers = _workers_of_first()
    if workers > 1:
        _has_warned = True
        logger.warning(
            "%s() of %r: the model belongs to no strategy, so each of the %d workers trains its own copy of it, with "
            "all of the data. To train one model together, create and compile it in `with strategy.scope():`, with "
            "strategy = phalanx.MultiWorkerMirroredStrategy().",
            method,
            model.name,
            workers,
        )


def warn_at_the_end() -> None:
    """Warn at the end of a program that has used Keras and joined no job, perhaps in a custom training loop."""
    if _has_warned or not hasattr(sys.modules.get("keras"), "distribution"):
        return
    if any(name.startswith(CLUSTER) for name in sys.modules) or _has_other_distribution():
        return
    workers = _workers_of_first()
    if workers > 1:
        logger.warning(
            "The program has created no strategy, so its %d workers did not train together: each ran all of it by "
            "itself. See phalanx.MultiWorkerMirroredStrategy and phalanx.horovod.",
            workers,
        )


def _has_other_distribution() -> bool:
    """Whether Keras or PyTorch has been told to distribute by itself."""
    import keras

    torch = sys.modules.get("torch.distributed")
    return keras.distribution.distribution() is not None or (torch is not None and torch.is_initialized())


def _workers_of_first() -> int:
    """The number of tasks that train, if this is the first of them; otherwise 0. Also 0 beside parameter servers,
    whose workers call functions that may train what they like."""
    config = json.loads(process_environment().get(TF_CONFIG) or "{}")
    cluster, task = config.get("cluster", {}), config.get("task", {})
    training = [f"{kind}/{index}" for kind in sorted(cluster) for index in range(len(cluster[kind]))]
    training = list(filter(trains, training))
    is_first = bool(training) and training[0] == f"{task.get('type')}/{task.get('index')}"
    return len(training) if is_first and "ps" not in cluster else 0
