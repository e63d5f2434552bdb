"""A replica of an interactive session (`python -m phalanx.strategies.replica_server`), which repeats its calls.

The first replica is the session's process. The others, which have no program, create copies of its models and call the
same methods with the same arguments, until the session ends.
"""

from __future__ import annotations

import math
import pickle
import sys
import time
from typing import Any

import msgspec

from phalanx.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx.collectives.cross_device_ops import CrossDeviceOps
from phalanx.errors import LinkClosedError, LinkTimeoutError
from phalanx.keras_compat.copies.keras_settings import set_keras_settings
from phalanx.keras_compat.copies.object_attributes import restore_layer_attributes
from phalanx.parameter_server.client.server_dialing import connect
from phalanx.runtime import function_call
from phalanx.strategies import replica_calls
from phalanx.strategies.current_job import join_job
from phalanx.strategies.replica_calls import (
    PURPOSE,
    Call,
    Done,
    Failed,
    FailureConfirmed,
    Message,
    Ready,
    RecentModels,
    SessionState,
    StrategyModel,
)
from phalanx.strategies.strategy import Strategy
from phalanx.training.model_dispatch import forget_trainer
from phalanx.training.program_effects.program_random_state import restore_random_state
from phalanx.training.replica import Replica
from phalanx.transport.decoding import Decoder
from phalanx.transport.link import Link

REPLY_TIMEOUT_S = 60.0
FAILURE_WAIT_S = 2.0
"""Seconds to wait for `FailureConfirmed`, which arrives soon if all replicas fail. If one alone fails, the others
wait."""

_MESSAGES = Decoder(Message)
_encode = msgspec.msgpack.Encoder().encode


class ReplicaServer:
    """Creates and calls copies of a session's models.

    Args:
        replica: The replica of this process.
        link: The link to the session's process.
    """

    def __init__(self, replica: Replica, link: Link) -> None:
        self._replica = replica
        self._link = link
        self._models: RecentModels[tuple[Any, CrossDeviceOps | None]] = RecentModels()

    def run(self) -> None:
        """Serve until the session ends.

        Raises: the error of a method that failed on this replica alone.
        """
        while True:
            try:
                # Days may pass between two cells of a notebook. The end of the session closes the link.
                header, buffers = self._link.receive(deadline=math.inf)
            except LinkClosedError:
                return
            call = _MESSAGES.decode(header)
            assert isinstance(call, Call), call
            try:
                model, arguments = self._prepare(call, buffers)
            except Exception as error:  # unpickling may raise anything; the session raises it
                self._reply(Failed(), error)
                continue
            self._reply(Ready())
            try:
                getattr(model, call.method)(**arguments)
            except Exception as error:
                self._reply(Failed(), error)
                if not self._is_failure_confirmed():
                    raise  # ends this process, so that the others do not wait for it
                continue
            self._reply(Done())

    def _is_failure_confirmed(self) -> bool:
        """Whether all replicas raised the same kind of error, which the session reports soon or never."""
        try:
            header, _ = self._link.receive(deadline=time.monotonic() + FAILURE_WAIT_S)
        except (LinkClosedError, LinkTimeoutError):
            return False
        return isinstance(_MESSAGES.decode(header), FailureConfirmed)

    def _prepare(self, call: Call, buffers: list[memoryview]) -> tuple[Any, dict[str, Any]]:
        # The link is authenticated with the job's secret, which only the session and its processes have.
        state: SessionState = pickle.loads(buffers.pop(0))
        sys.path[:] = state.path  # before anything else is unpickled, which may import modules of the session
        set_keras_settings(state.settings)
        if call.has_model:
            strategy_model: StrategyModel = pickle.loads(buffers.pop(0))
            with Strategy(self._replica, policy=strategy_model.policy).scope():
                entry = strategy_model.copy.rebuild(), strategy_model.cross_device_ops
        else:
            entry = self._models[call.model]
            restore_layer_attributes(entry[0], state.attributes)
        model, self._replica.cross_device_ops = entry
        if not state.has_compiled_functions:
            forget_trainer(model)
        arguments = replica_calls.unpack_arguments(dict(zip(call.arguments, buffers, strict=True)), model)
        self._models.record(call.model, entry)  # as the session does if nothing failed
        # Last: building the model and unpacking may draw random numbers.
        restore_random_state(state.random)
        return model, arguments

    def _reply(self, reply: Message, error: BaseException | None = None) -> None:
        content = [function_call.encode_error(error)] if error is not None else []
        self._link.send(_encode(reply), content, deadline=time.monotonic() + REPLY_TIMEOUT_S)


def main() -> None:
    job = join_job(TFConfigClusterResolver(), None)
    job.replica.has_copies = True
    identity = job.identity
    link = connect(identity, identity.tasks[0], PURPOSE, time.monotonic() + identity.config.rendezvous_timeout_s)
    ReplicaServer(job.replica, link).run()


if __name__ == "__main__":
    main()
