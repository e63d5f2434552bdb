"""Elastic training with PyTorch: `hvd.elastic.run`, `hvd.elastic.TorchState`. Names are Horovod's."""

from __future__ import annotations

from phalanx.horovod.elastic import ObjectState, State, run
from phalanx.horovod.torch.elastic.sampler import ElasticSampler
from phalanx.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
