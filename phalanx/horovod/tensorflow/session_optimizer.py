"""A TensorFlow 1 optimizer that first reduces the gradients over the ranks. Names and semantics are Horovod's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from phalanx.errors import ConfigurationError
from phalanx.horovod.gradient_reduction import GradientReduction
from phalanx.horovod.tensorflow.functions import tensorflow_variable
from phalanx.horovod.tensorflow.tape import reduce_nonlocal

v1 = tf.compat.v1
Gradients = list[Any]


class SessionOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Wraps an optimizer of `tf.compat.v1.train`; `compute_gradients` returns gradients reduced over the ranks.

    Args:
        optimizer: The original, which computes and applies gradients, and holds the slots.
        reduction: The reduction of the gradients.
        scale_local_gradients: Whether gradients that are not reduced are divided by the number of ranks.
        accumulation: Accumulation of the gradients of several runs; None reduces and applies those of each run.
        name: Name of the operations.
        use_locking: See TensorFlow 1's optimizers.
    """

    def __init__(
        self,
        optimizer: Any,
        reduction: GradientReduction,
        *,
        scale_local_gradients: bool = True,
        accumulation: GradientAccumulation | None = None,
        name: str | None = None,
        use_locking: bool = False,
    ):
        if isinstance(optimizer, SessionOptimizer):
            raise ConfigurationError("this optimizer is a DistributedOptimizer already.")
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = reduction
        self._scale_local_gradients = scale_local_gradients
        self._accumulation = accumulation
        self._local: set[int] = set()  # identities of variables

    def register_local_var(self, variable: Any) -> None:
        """Do not reduce the gradients of this variable."""
        self._local.add(id(tensorflow_variable(variable)))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of a reduced gradient and its variable; see the wrapped optimizer."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        local = {index for index, each in enumerate(variables) if id(tensorflow_variable(each)) in self._local}

        def reduce(gradients: Sequence[Any]) -> Gradients:
            return reduce_nonlocal(gradients, local, self._reduction, scale_local_gradients=self._scale_local_gradients)

        gradients = [gradient for gradient, _ in pairs]
        reduced = reduce(gradients) if self._accumulation is None else self._accumulation.add(gradients, reduce)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """See the wrapped optimizer. While gradients accumulate, this changes only the global step, which counts the
        runs, as in Horovod."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        def count() -> Any:
            return tf.no_op() if global_step is None else v1.assign_add(global_step, tf.ones_like(global_step))

        if self._accumulation is None:
            return apply()
        return self._accumulation.cond_on_last_pass(lambda: tf.group(apply()), lambda: tf.group(count()))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """See the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """See the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self) -> Any:
        """See the wrapped optimizer."""
        return self._optimizer.variables()


class GradientAccumulation:
    """Sums the gradients of several runs of a graph in local variables; the last run reduces and applies them.

    Args:
        passes: Number of runs to sum.
        average: Whether gradients are averaged instead.
    """

    def __init__(self, passes: int, *, average: bool):
        self._passes = passes
        self._average = average
        self._is_last_pass: Any = None

    def add(self, gradients: Sequence[Any], reduce: Callable[[Sequence[Any]], Gradients]) -> Gradients:
        """Add this run's gradients. Returns the reduced sums in the last run, and zeros in the others."""
        if tf.executing_eagerly():
            raise ConfigurationError(
                "backward_passes_per_step of an optimizer of TensorFlow 1 needs a graph. In eager code, use an "
                "optimizer of Keras."
            )
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        values = [tf.convert_to_tensor(gradients[index]) for index in present]
        sums = [_local_variable(tf.zeros(value.shape, value.dtype)) for value in values]
        count = _local_variable(tf.constant(0))
        # Everything that depends on `_is_last_pass` runs, and reads the sums, after they are complete.
        with tf.control_dependencies([total.assign_add(value) for total, value in zip(sums, values, strict=True)]):
            self._is_last_pass = tf.equal(tf.identity(count.assign_add(1)) % self._passes, 0)

        def merge() -> Gradients:
            divisor = self._passes if self._average else 1
            everything: Gradients = [None] * len(gradients)
            for index, total in zip(present, sums, strict=True):
                everything[index] = total.read_value() / divisor
            reduced = reduce(everything)
            # Cleared after reading them and before the result is applied: the next run adds to zeros.
            with tf.control_dependencies([reduced[index] for index in present]):
                cleared = [total.assign(tf.zeros_like(total)) for total in sums]
            with tf.control_dependencies(cleared):
                return [tf.identity(reduced[index]) for index in present]

        merged = v1.cond(self._is_last_pass, merge, lambda: [tf.zeros_like(value) for value in values])
        result: Gradients = [None] * len(gradients)
        for index, value in zip(present, tf.nest.flatten(merged), strict=True):
            result[index] = value
        return result

    def cond_on_last_pass(self, apply: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Return an operation that calls `apply` in the last run, and `otherwise` in the others."""
        if self._is_last_pass is None:
            raise ConfigurationError(
                "with backward_passes_per_step, apply_gradients() needs the gradients that compute_gradients() of the "
                "same optimizer returned: call that first, or call minimize()."
            )
        return v1.cond(self._is_last_pass, apply, otherwise)


def _local_variable(initial: Any) -> Any:
    return v1.Variable(initial, trainable=False, collections=[v1.GraphKeys.LOCAL_VARIABLES], use_resource=True)
