"""The state of a PyTorch program: modules, optimizers, schedulers, samplers. Names and meaning are Horovod's.

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
        value: the object.
    """

    def __init__(self, value: Any):
        self.value = value

    def prepare(self) -> None:
        """Communicate with the other members before `save`; all of them call."""

    def save(self) -> None:
        """Save the object as it is now, without communication."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Overwrite the object with that of rank 0; all members call."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another object from now on."""
        self.value = value
        self.save()


class _WithStateDict(StateHandler):
    """For objects with `state_dict` and `load_state_dict`."""

    def __init__(self, value: Any):
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy, because an optimizer would update the tensors that it loads.
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_WithStateDict):
    """For modules."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_WithStateDict):
    """For optimizers, distributed or not."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class LRSchedulerStateHandler(_WithStateDict):
    """For learning rate schedulers."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic.scheduler"))


class SamplerStateHandler(_WithStateDict):
    """For an `ElasticSampler`: what one member has recorded counts as processed on all once it is saved."""

    def prepare(self) -> None:
        self.value.unite(_union(self.value.processed_indices))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic.sampler"))


class TorchState(ObjectState):
    """The state of a PyTorch program, each part an attribute.

    Args:
        model: a module.
        optimizer: an optimizer.
        kwargs: more objects: modules, optimizers, schedulers, samplers, and others that have a handler; all others are
            saved as by `ObjectState`.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any):
        parts = {**kwargs, "model": model, "optimizer": optimizer}
        # Set before the attributes, on which `__setattr__` looks for handlers.
        self._handlers = {name: handler for name, value in parts.items() if (handler := _handler_of(value)) is not None}
        for name, handler in self._handlers.items():
            vars(self)[name] = handler.value
        super().__init__(**{name: value for name, value in parts.items() if name not in self._handlers})

    def save(self) -> None:
        """See `State.save`."""
        # Whatever can fail with a lost member first; nothing is saved until then.
        for handler in self._handlers.values():
            handler.prepare()
        self._keep()

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
        self._keep()

    def reset(self) -> None:
        """See `State.reset`."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in vars(self).get("_handlers", {}):
            self._handlers[name].set_value(value)

    def _keep(self) -> None:
        """Save without communication, so that it happens as a whole or, if this process is lost, not at all."""
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
    """Types and their handlers; the first that fits is used."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use these handlers for each `TorchState` created from now on."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


def _union(own: set[int]) -> set[int]:
    """The union of all members' sets."""
    (indices,) = operations.run(OperationKind.ALLGATHER, [np.array(sorted(own), np.int64)])
    return set(indices.tolist())
