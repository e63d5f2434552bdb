"""The state of a PyTorch program: modules, optimizers, schedulers, samplers. Names and semantics are Horovod's.

A handler saves, restores and synchronizes the objects of one type. `get_handler_registry` lists the handlers by type;
`set_handler_registry` replaces the list.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from phalanx.horovod import operations
from phalanx.horovod.elastic.object_state import ObjectState
from phalanx.horovod.object_collectives import broadcast_object
from phalanx.horovod.operation_request import OperationKind
from phalanx.horovod.torch.elastic.sampler import ElasticSampler
from phalanx.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """Saves, restores and synchronizes one object of a `TorchState`.

    Args:
        value: The object.
    """

    def __init__(self, value: Any):
        self.value = value

    def pre_save(self) -> None:
        """Communicate with the other members before `save`; all of them call this."""

    def save(self) -> None:
        """Save the current object, without communication."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the last saved object."""
        raise NotImplementedError

    def sync(self) -> None:
        """Overwrite the object with rank 0's; all members call this."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle and save another object instead."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Handler of objects with `state_dict` and `load_state_dict`."""

    def __init__(self, value: Any):
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy, because an optimizer would update the tensors that it loads.
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_StateDictHandler):
    """Handler of modules."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    """Handler of optimizers, distributed or not."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class LRSchedulerStateHandler(_StateDictHandler):
    """Handler of learning rate schedulers."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic.scheduler"))


class SamplerStateHandler(_StateDictHandler):
    """Handler of an `ElasticSampler`: samples recorded by one member count as processed on all after a save."""

    def pre_save(self) -> None:
        self.value.set_processed(_union(self.value.processed_indices))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic.sampler"))


class TorchState(ObjectState):
    """The state of a PyTorch program, each part an attribute.

    Args:
        model: A module.
        optimizer: An optimizer.
        kwargs: More objects: modules, optimizers, schedulers, samplers, and others with a handler. Objects without a
            handler are saved as in `ObjectState`.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any):
        parts = {**kwargs, "model": model, "optimizer": optimizer}
        # Set before the attributes, because `__setattr__` looks for handlers.
        self._handlers = {name: handler for name, value in parts.items() if (handler := _handler_of(value)) is not None}
        for name, handler in self._handlers.items():
            vars(self)[name] = handler.value
        super().__init__(**{name: value for name, value in parts.items() if name not in self._handlers})

    def save(self) -> None:
        """See `State.save`."""
        # First everything that can fail with a lost member; nothing is saved before that.
        for handler in self._handlers.values():
            handler.pre_save()
        self._snapshot()

    def restore(self) -> None:
        """See `State.restore`."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """See `State.sync`."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        self._snapshot()

    def reset(self) -> None:
        """See `State.reset`."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in vars(self).get("_handlers", {}):
            self._handlers[name].set_value(value)

    def _snapshot(self) -> None:
        """Save without communication, so that everything is saved or, if this process is lost, nothing."""
        for handler in self._handlers.values():
            handler.save()
        super().save()


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return types and their handlers; the first matching type is used."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use these handlers for every new `TorchState`."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


def _union(own: set[int]) -> set[int]:
    """Return the union of all members' sets."""
    (indices,) = operations.run(OperationKind.ALLGATHER, [np.array(sorted(own), np.int64)])
    return set(indices.tolist())
