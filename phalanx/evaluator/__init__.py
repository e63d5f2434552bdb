"""Evaluates the checkpoints of a running job from a separate process."""

from phalanx.evaluator.sidecar_evaluator import SidecarEvaluator

__all__ = ["SidecarEvaluator"]
