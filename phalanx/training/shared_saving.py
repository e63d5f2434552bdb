"""`model.save` and `model.save_weights` in a job: several tasks may write and read the same file at once."""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path
from typing import Any

from phalanx.keras_compat.trainer_hook import SAVED_SUFFIXES, KerasMethod
from phalanx.storage.paths import is_url
from phalanx.training.replica import Replica
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker

logger = logging.getLogger(__name__)


def save(
    model: Any,
    member: Replica | ParameterServerWorker | None,
    method: KerasMethod,
    filepath: Any,
    overwrite: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Save a model so that the file appears whole or not at all.

    With `overwrite=False` Keras asks at the terminal whether to overwrite a file; then only the chief does.

    Args:
        member: Member that owns the model; None if Keras itself trains it.
        method: Keras's own `save` or `save_weights`.
        filepath, overwrite, args, kwargs: Arguments of Keras's method.
    """
    if isinstance(member, Replica) and member.is_candidate and os.path.exists(filepath):
        logger.warning("%s is not overwritten: this worker joined late and may lack what others have saved.", filepath)
        return None
    if member is not None and not overwrite and not member.is_chief and os.path.exists(filepath):
        logger.warning("%s exists and is not overwritten: only the chief checks whether to overwrite it.", filepath)
        return None
    suffixes = SAVED_SUFFIXES[method.name]
    is_special = member is None or not overwrite or args or kwargs
    place = None if is_special else _single_file(filepath, suffixes)
    if place is None:
        return method(model, filepath, overwrite, *args, **kwargs)
    suffix = next(suffix for suffix in suffixes if str(filepath).endswith(suffix))
    temporary = place.with_name(f".{uuid.uuid4().hex}{suffix}")
    try:
        result = method(model, temporary)
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)
    return result


def _single_file(filepath: Any, suffixes: tuple[str, ...]) -> Path | None:
    """Return the file that is written; None if it is several, or not in this file system."""
    if not isinstance(filepath, str | os.PathLike) or is_url(filepath):
        return None
    place = Path(os.path.realpath(filepath))
    return place if str(filepath).endswith(suffixes) and place.parent.is_dir() and not place.is_dir() else None
