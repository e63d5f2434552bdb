"""The version of Phalanx, read by the build and by the handshake between tasks."""

__version__ = "0.2.0"
