"""Makes `tf.nn.compute_average_loss` and `tf.nn.scale_regularization_loss` count Phalanx's replicas.

They divide by the number of replicas of TensorFlow's own current strategy, which is 1 here: a loss, and its gradients,
would be too large by a factor of the number of replicas. That is right only in the steps of `fit`, whose gradients are
averaged. They read it from the module `distribute_lib` in `tensorflow.python.ops.nn_impl_distribute`. Tested with
TensorFlow 2.21.
"""

from __future__ import annotations

import logging
from typing import Any

from phalanx.keras_compat.global_batch.step_means import is_in_step

logger = logging.getLogger(__name__)


class _ScopedDistributeLib:
    """TensorFlow's module outside of Phalanx's scopes, Phalanx's inside."""

    def __init__(self, tensorflows: Any, ours: Any) -> None:
        self._tensorflows, self._ours = tensorflows, ours

    def get_strategy(self) -> Any:
        return self._ours.current_strategy() if self._is_ours() else self._tensorflows.get_strategy()

    def has_strategy(self) -> bool:
        return self._is_ours() or bool(self._tensorflows.has_strategy())

    def in_cross_replica_context(self) -> bool:
        current = self._ours if self._is_ours() else self._tensorflows
        return bool(current.in_cross_replica_context())

    def _is_ours(self) -> bool:
        return self._ours.has_strategy() and not is_in_step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensorflows, name)


def count_replicas(contexts: Any) -> None:
    """Make the two functions use `contexts` from now on. Safe to call twice."""
    try:
        from tensorflow.python.ops import nn_impl_distribute

        module = nn_impl_distribute.distribute_lib
    except (ImportError, AttributeError):
        logger.warning(
            "This version of TensorFlow does not let tf.nn.compute_average_loss count replicas: pass "
            "global_batch_size, and call phalanx.scale_regularization_loss."
        )
        return
    if not isinstance(module, _ScopedDistributeLib):
        nn_impl_distribute.distribute_lib = _ScopedDistributeLib(module, contexts)
