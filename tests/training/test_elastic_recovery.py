"""What a member of an elastic job does when it becomes chief, in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

import phalanx
from phalanx.checkpoint.callback_state import restore_states
from phalanx.training import callback_list
from phalanx.training.elastic_recovery import ElasticRecovery
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.fit_position import FitRecorder
from phalanx.training.fit_state import ReplicaFitState
from phalanx.training.replica import single_replica
from phalanx.training.replica_model import ReplicaModel
from phalanx.transport.serialization import encode


def test_the_chiefs_own_callbacks_continue_on_its_successor_with_what_they_have_learnt() -> None:
    stopping = keras.callbacks.EarlyStopping("loss", patience=3)
    seen: list[Any] = []
    stopping.on_epoch_begin = lambda epoch, logs=None: seen.append((epoch, stopping.wait))
    callbacks = [phalanx.callbacks.OnChief(stopping)]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    replica_model = ReplicaModel(model, single_replica())
    x = np.zeros((4, 2), np.float32)
    source = replica_model.shard(x, x[:, :1], None, steps=None, seed=0, batch_size=2)
    state = ReplicaFitState(arguments=FitArguments(x, epochs=9, verbose=0, callbacks=callbacks), source=source)
    others: Any = {"is_chief": False, "replicas": 2, "verbose": 0, "add_history": True}
    state.use_callbacks(callback_list.build_callback_list(callbacks, model, **others))
    state.callbacks.on_train_begin()
    recorder = FitRecorder(replica_model, state, is_continuable=True)
    recorder.track_callbacks()
    recovery = ElasticRecovery(replica_model, SimpleNamespace(), state, recorder)  # type: ignore[arg-type]
    restore_states([stopping], [("EarlyStopping", encode({"wait": 2, "best": 0.5}))])  # after the last epoch
    state.epoch = 4
    recovery._become_chief()
    assert (stopping.wait, stopping.best) == (2, 0.5)
    assert seen == [(4, 2)]
    assert stopping in state.callbacks.callbacks
