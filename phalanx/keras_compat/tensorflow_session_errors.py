"""Converts errors that Python functions raise in a session to the types that callers catch.

A Python function in a graph cannot choose the type of the error that a session raises: TensorFlow recognizes four of
Python's own exceptions, and turns every other into an UnknownError with its text (`DoCallPyFunc` in `py_func.cc`). All
sessions raise errors in one method, which is patched. Tested with TensorFlow 2.21.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from phalanx.keras_compat.patching import defining_class

Translate = Callable[[tf.errors.UnknownError], Exception | None]
_translations: list[Translate] = []


def translate_session_errors(translate: Translate) -> None:
    """Make sessions raise the result of `translate(UnknownError)`; None keeps the error. Safe to call twice."""
    if translate in _translations:
        return
    if not _translations:
        kind = defining_class(tf.compat.v1.Session, "run")
        kind.run = _translating(kind.run)  # type: ignore[attr-defined]
    _translations.append(translate)


def _translating(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(session: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(session, *args, **kwargs)
        except tf.errors.UnknownError as error:
            translated = next((each for translate in _translations if (each := translate(error))), None)
            if translated is None:
                raise
            raise translated from None  # it has the whole text of the original

    return run
