"""Scenarios run as those of training do."""

from tests.training.conftest import findings

__all__ = ["findings"]
