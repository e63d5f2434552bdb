"""Callbacks for `fit`, beside Keras's own."""

from phalanx.strategies.strategy import install_hook
from phalanx.training.saving import Checkpoint

__all__ = ["Checkpoint"]

install_hook()  # `Checkpoint` works in programs without a strategy as well
