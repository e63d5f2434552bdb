"""Conditions on an optimizer under which the fused Adams may replace its update."""

from __future__ import annotations

from typing import Any


def has_plain_coefficients(optimizer: Any) -> bool:
    """Whether an Adam's betas and epsilon are Python numbers in the range for which its formula is defined.

    A program may set anything there, such as a variable that it changes later.
    """
    betas = (optimizer.beta_1, optimizer.beta_2)
    return type(optimizer.epsilon) in (float, int) and all(type(beta) is float and 0.0 <= beta < 1.0 for beta in betas)
