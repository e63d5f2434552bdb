"""`fit`, `evaluate` and `predict` of a Keras model on one worker, with parameter servers.

Arguments and results are those of the Keras methods. `batch_size` is the size of one update: in asynchronous training
one worker's batch, in synchronous training that of all workers. On workers other than the chief, `fit` returns the
history of their own part, with the results of the chief's validation.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

from keras.callbacks import CallbackList

from phalanx.data import ShardedInput, shard_input
from phalanx.data.input_request import InputRequest, OrderAgreement
from phalanx.data.numbered_batches import NumberedBatches
from phalanx.errors import PhalanxError, UnsupportedError
from phalanx.keras_compat.callback_bases import flatten_callbacks
from phalanx.keras_compat.keras_internals import print_msg
from phalanx.keras_compat.model_state import overrides
from phalanx.parameter_server.client.parameter_client import HEAD
from phalanx.parameter_server.server_messages import RequestStop
from phalanx.training import callback_list, saver_claims
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.fit_loop import FitLoop
from phalanx.training.fit_state import FitState
from phalanx.training.servers.parameter_server_coordination import (
    FitRejoin,
    ParameterServerCoordination,
    ValidationHeartbeat,
)
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker
from phalanx.training.servers.remote_model import RemoteModel
from phalanx.training.servers.ticket_batches import TicketBatches

OriginalMethod = Callable[[str], Callable[..., Any]]
"""Returns Keras's own method of a name, bound to the model."""


class ParameterServerTrainer:
    """Trains one compiled Keras model with parameter servers.

    Args:
        original: Returns Keras's own methods.
    """

    def __init__(self, model: Any, worker: ParameterServerWorker, original: OriginalMethod) -> None:
        self._model = model
        self._worker = worker
        self._original = original
        self._remote_model = RemoteModel(model, worker)
        self._rejoin: FitRejoin | None = None  # for the running `fit`
        self._is_announced = False

    def fit(self, **arguments: Any) -> Any:
        """Train the model; takes `FitArguments`."""
        model, worker = self._model, self._worker
        if worker.in_function:
            raise UnsupportedError(
                "fit() was called inside a function that a ClusterCoordinator has scheduled. It trains with all "
                "workers at once: call optimizer.apply() there, or fit() in the program itself, on every task."
            )
        model._assert_compile_called("fit")
        with worker.fitting():
            return self._fit(FitArguments(**arguments))

    def _fit(self, arguments: FitArguments) -> Any:
        model, worker, remote_model = self._model, self._worker, self._remote_model
        state = FitState(arguments=arguments)
        # All workers have the same count: by this number, their messages of one `fit` meet at the servers.
        fit = worker.next_fit()
        batches = TicketBatches(fit, worker, remote_model.merge)
        source = self._open_input(fit, state.arguments, batches)
        batches.set_source(NumberedBatches(source))
        remote_model.prepare(source)
        state.use_callbacks(self._build_callbacks(state.arguments, source))
        if worker.is_chief and not self._is_announced and state.arguments.verbose != 0:
            self._is_announced = True
            print_msg(worker.describe())
        evaluate = self._original("evaluate")
        if overrides(model, "evaluate"):
            evaluate = partial(model.evaluate, _use_cached_eval_dataset=True)
        coordination = ParameterServerCoordination(fit, remote_model, worker, state, batches, evaluate)
        # From here on, `request_stop` of any callback finds the `fit` to stop, and a restarted head is sent the state
        # again.
        self._rejoin = coordination.rejoin
        try:
            with state.exit_stack:
                saver_claims.claim_paths(state.callbacks, state.exit_stack)
                return FitLoop(model, state, coordination).run()
        except PhalanxError:  # perhaps of a lost server, which cannot answer any request
            raise
        except Exception:
            # An error of the program, which may catch it on all workers and continue with the model.
            if worker.rules.is_lockstep:
                remote_model.pull_consistent()
            raise
        finally:
            self._rejoin = worker.client.reconnection.rejoin_requests = None
            remote_model.is_training = False

    def _open_input(self, fit: int, arguments: FitArguments, batches: TicketBatches) -> ShardedInput:
        worker = self._worker
        request = InputRequest(
            arguments.x,
            arguments.y,
            arguments.sample_weight,
            batch_size=arguments.batch_size,
            steps_per_epoch=arguments.steps_per_epoch,
            shuffle=arguments.shuffle,
            class_weight=arguments.class_weight,
            steps_per_execution=self._model.steps_per_execution,
            is_read_by_all=worker.workers > 1,
            shuffling=OrderAgreement(worker.is_chief, from_chief=batches.agree_on_order),
            # `hash` would differ between processes.
            seed=zlib.crc32(f"{worker.seed} {fit}".encode()),
        )
        return shard_input(request)

    def _build_callbacks(self, arguments: FitArguments, source: ShardedInput) -> Any:
        worker, callbacks = self._worker, arguments.callbacks
        validates = worker.workers > 1 and arguments.validation_data is not None
        if validates and not isinstance(callbacks, CallbackList):
            callbacks = [*flatten_callbacks(callbacks), ValidationHeartbeat(worker.client)]
        return callback_list.build_callback_list(
            callbacks,
            self._model,
            is_chief=worker.is_chief,
            replicas=worker.workers,
            verbose=arguments.verbose,
            epochs=arguments.epochs,
            steps=source.num_batches,
            add_history=True,
        )

    def _run_locally(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call Keras's method on this worker only, with the servers' newest weights."""
        kwargs.pop("_use_cached_eval_dataset", None)  # Keras's own `fit`, which fills that cache, has not run
        self._remote_model.refresh()
        return self._original(method)(*args, **kwargs)

    evaluate = partialmethod(_run_locally, "evaluate")
    predict = partialmethod(_run_locally, "predict")
    test_on_batch = partialmethod(_run_locally, "test_on_batch")
    predict_on_batch = partialmethod(_run_locally, "predict_on_batch")

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported."""
        raise UnsupportedError(
            "train_on_batch() is not supported with parameter servers: the servers decide who trains on which batch. "
            "Use fit(), with a callback for actions between batches."
        )

    # For callbacks during `fit`.

    def pull_consistent(self) -> None:
        """See `RemoteModel.pull_consistent`."""
        self._remote_model.pull_consistent()

    def request_stop(self) -> None:
        """From any worker, request that the chief ends the running `fit` after the epoch."""
        if self._rejoin is not None:
            self._rejoin.is_stop_requested = True
        self._worker.client.request(HEAD, RequestStop(self._worker.last_fit, stop=True))
