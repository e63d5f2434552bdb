"""Callbacks for `fit`, beside Keras's own."""

from phalanx.checkpoint.checkpoint_callback import Checkpoint
from phalanx.strategies.strategy import install_hook

__all__ = ["Checkpoint"]

install_hook()  # `Checkpoint` works in programs without a strategy as well
