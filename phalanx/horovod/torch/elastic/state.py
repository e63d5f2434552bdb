"""The state of a PyTorch program: modules, optimizers, schedulers, samplers. Names and meaning are Horovod's.

A handler says of things of a type how they are kept and given to others. `get_handler_registry` lists them by type, and
`set_handler_registry` takes a list with more of them.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from phalanx.horovod import operations
from phalanx.horovod.elastic.state import ObjectState
from phalanx.horovod.object_collectives import broadcast_object
from phalanx.horovod.torch.elastic.sampler import ElasticSampler
from phalanx.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """How one thing of a `TorchState` is kept.

    Args:
        value: the thing.
    """

    def __init__(self, value: Any):
        self.value = value

    def prepare(self) -> None:
        """What needs the other members before the thing can be kept; all of them call."""

    def save(self) -> None:
        """Keep the thing as it is now. Other members are not asked."""
        raise NotImplementedError

    def restore(self) -> None:
        """Make it again what was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make it what it is on rank 0; all members call."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another thing from now on."""
        self.value = value
        self.save()


class _WithStateDict(StateHandler):
    """Of what has `state_dict` and `load_state_dict`."""

    def __init__(self, value: Any):
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy: an optimizer would go on in the tensors that it loads.
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_WithStateDict):
    """Of a module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_WithStateDict):
    """Of an optimizer, of `hvd.DistributedOptimizer` or not."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class LRSchedulerStateHandler(_WithStateDict):
    """Of a learning rate scheduler."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic.scheduler"))


class SamplerStateHandler(_WithStateDict):
    """Of an `ElasticSampler`: what one member has recorded counts as processed for all when it is kept."""

    def prepare(self) -> None:
        self.value.unite(_union(self.value.processed_indices))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic.sampler"))


class TorchState(ObjectState):
    """The state of a PyTorch program, each part an attribute.

    Args:
        model: a module.
        optimizer: an optimizer.
        kwargs: more parts: modules, optimizers, schedulers and samplers, and whatever there is a handler for; anything
            else is kept as `ObjectState` keeps it.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any):
        parts = {**kwargs, "model": model, "optimizer": optimizer}
        self._handlers = {name: handler for name, value in parts.items() if (handler := _handler_of(value)) is not None}
        for name, handler in self._handlers.items():
            vars(self)[name] = handler.value
        super().__init__(**{name: value for name, value in parts.items() if name not in self._handlers})

    def save(self) -> None:
        """See `State.save`."""
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
        """Other members are not asked, so it happens as a whole or, if this process is lost, not at all."""
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
    """Which handler is for things of which type; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use these handlers for each `TorchState` that is made from now on."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


def _union(own: set[int]) -> set[int]:
    """What is in any member's set."""
    (everybodys,) = operations.allgather([np.array(sorted(own), np.int64)], wake=False).wait()
    return set(everybodys.tolist())
