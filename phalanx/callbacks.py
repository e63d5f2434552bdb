"""Callbacks for `fit`, in addition to Keras's."""

from phalanx.checkpoint.checkpoint_callback import Checkpoint
from phalanx.strategies.strategy import install_hook

__all__ = ["Checkpoint"]

install_hook()  # `Checkpoint` also works in programs without a strategy
