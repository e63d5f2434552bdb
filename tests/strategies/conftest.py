"""The strategy interface is checked inside real jobs, run as those of `tests/training` are."""

from tests.training.conftest import findings

__all__ = ["findings"]
