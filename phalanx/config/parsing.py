"""Functions that each parse one environment variable in a mapping. Unset and empty variables mean the default."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from phalanx.errors import ConfigurationError


def parse_number(
    values: Mapping[str, str], name: str, default: float, *, unit: str = "", positive: bool = False
) -> float:
    """Parse a finite number of at least 0, or greater than 0 if `positive`.

    Raises: ConfigurationError naming the variable and its value.
    """
    number = parse_optional_number(values, name, unit=unit, positive=positive, example=default)
    return default if number is None else number


def parse_optional_number(
    values: Mapping[str, str], name: str, *, unit: str = "", positive: bool = False, example: float
) -> float | None:
    """Like `parse_number`, but return None if the variable is not set."""
    text = values.get(name)
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (positive and number == 0):
        wanted = f"a number{f' of {unit}' if unit else ''} {'greater than 0' if positive else 'of at least 0'}"
        raise ConfigurationError(f"{name}={text!r} is not {wanted}. Write for example {name}={example:g}.")
    return number


def parse_integer(values: Mapping[str, str], name: str) -> int | None:
    """Parse a whole number of at least 0. Return None if the variable is not set."""
    text = values.get(name)
    if not text:
        return None
    # Not int() alone: it also accepts "1_000" and digits of other scripts, and fails for thousands of digits.
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ConfigurationError(f"{name}={text!r} is not a whole number of at least 0. Write for example {name}=3.")
    return int(text)


def parse_switch(values: Mapping[str, str], name: str) -> bool:
    """Parse a switch: off for 0, false, no and off. Horovod itself reads every word as 0, and so as off."""
    return values.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def parse_path(values: Mapping[str, str], name: str) -> Path | None:
    """Return an absolute path, because a program may change its directory later; None if the variable is not set."""
    return Path(values[name]).absolute() if values.get(name) else None


def parse_signal(name: str) -> signal.Signals:
    """Parse the name of a signal, such as USR1 or SIGUSR1.

    Raises: ConfigurationError for a signal that cannot announce a preemption.
    """
    upper = name.upper()
    found = getattr(signal, upper if upper.startswith("SIG") else f"SIG{upper}", None)
    reserved = (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2)
    if not isinstance(found, signal.Signals) or found in reserved:
        raise ConfigurationError(
            f"{name!r} is not a signal for preemption. Write for example USR1 or TERM. KILL and STOP cannot be caught, "
            f"INT ends a job at once, and Phalanx uses USR2 and CHLD itself."
        )
    return found
