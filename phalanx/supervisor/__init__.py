"""TensorFlow 1's training supervisor for Keras 3 models: `Supervisor`, `ManagedSession`, `Saver`."""

from phalanx.supervisor.managed_session import ManagedSession
from phalanx.supervisor.saver import Saver
from phalanx.supervisor.supervisor import Supervisor

__all__ = ["ManagedSession", "Saver", "Supervisor"]
