"""Hooks on objects of vLLM, each replaced method recorded so that removing them is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Replaces methods of single objects. `hook(original, *args, **kwargs)` is called instead of the method.

    remove() puts everything back. Where somebody else has wrapped a method after us, theirs stays, and what is left of
    ours below it only calls on.
    """

    def __init__(self) -> None:
        self._placed: list[tuple[Any, str, object, Callable[..., Any]]] = []
        self.live = True

    def wrap(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not self.live:
                return original(*args, **kwargs)
            return hook(original, *args, **kwargs)

        hooked.__name__ = hooked.__qualname__ = f"kvq_{name}"
        self._placed.append((owner, name, vars(owner).get(name, _ABSENT), hooked))
        setattr(owner, name, hooked)

    def remove(self) -> None:
        """Idempotent."""
        self.live = False
        while self._placed:
            owner, name, before, hooked = self._placed.pop()
            if vars(owner).get(name) is not hooked:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
