"""Who watches over a job from outside of its steps: the supervisor, which saves and restores, and the evaluator."""

from __future__ import annotations

from phalanx.supervision.evaluator import SidecarEvaluator
from phalanx.supervision.saver import Saver
from phalanx.supervision.session import ManagedSession
from phalanx.supervision.supervisor import Supervisor

__all__ = ["ManagedSession", "Saver", "SidecarEvaluator", "Supervisor"]
