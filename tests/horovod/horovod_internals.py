"""What Horovod's own tests import of its internals: helpers of the tests, of which Phalanx has no copy."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from packaging import version


def _executing_eagerly() -> bool:
    import tensorflow as tf

    return bool(tf.executing_eagerly())


def is_version_greater_equal_than(present: str, wanted: str) -> bool:
    return version.parse(present) >= version.parse(wanted)


def get_env_rank_and_size() -> tuple[int, int]:
    return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])


def in_thread(target: Callable[..., Any], args: Sequence[Any] = (), daemon: bool = True) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=daemon)
    thread.start()
    return thread


@contextmanager
def env(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


class _basics:
    @staticmethod
    def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
        from phalanx.horovod.common.process_sets import get_process_set_ids_and_ranks

        return get_process_set_ids_and_ranks()
