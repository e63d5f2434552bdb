"""Callbacks for `fit`, in addition to Keras's."""

from phalanx.checkpoint.checkpoint_callback import Checkpoint
from phalanx.checkpoint.model_export import SidecarEvaluatorModelExport
from phalanx.keras_compat.callback_bases import OnChief
from phalanx.strategies.strategy import install_trainer_hook

__all__ = ["Checkpoint", "OnChief", "SidecarEvaluatorModelExport"]

install_trainer_hook()  # `Checkpoint` also works in programs without a strategy
