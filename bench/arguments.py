"""Numbers on a command line, refused by argparse with the value and what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def number(kind: type[Number], low: float, high: float = math.inf) -> Callable[[str], Number]:
    """An argparse type: a finite number of `kind` from `low` to `high`, both included."""
    noun = "a whole number" if kind is int else "a number"
    allowed = f"{noun} of at least {low}" if high == math.inf else f"{noun} from {low} to {high}"

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = kind(low) - 1
        if not low <= value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give {allowed}")
        return value

    return parse
