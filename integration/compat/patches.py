"""Hooks on objects of vLLM: methods of single objects, replaced so that removing them is exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

_ABSENT = object()


class Hook:
    """`hook(original, *args, **kwargs)` is called instead of one method of one object, while it is on."""

    def __init__(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        self._owner, self._name, self._hook = owner, name, hook
        self._before: object = _ABSENT
        self._placed: Callable[..., Any] | None = None
        self.on()

    def on(self) -> None:
        """Idempotent."""
        if self._placed is None:
            self._before = vars(self._owner).get(self._name, _ABSENT)
            self._placed = partial(self._hook, getattr(self._owner, self._name))
            setattr(self._owner, self._name, self._placed)

    def off(self) -> None:
        """The method is what it was. Somebody else's wrapper around ours stays, and calls ours. Idempotent."""
        if self._placed is not None and vars(self._owner).get(self._name) is self._placed:
            if self._before is _ABSENT:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._before)
            self._placed = None


class Patches:
    """The hooks of one owner of hooks. After `remove` those that could not come off only call on."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self.live = True

    def wrap(self, owner: Any, name: str, hook: Callable[..., Any]) -> Hook:
        def checked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs) if self.live else original(*args, **kwargs)

        return self.wrap_directly(owner, name, checked)

    def wrap_directly(self, owner: Any, name: str, hook: Callable[..., Any]) -> Hook:
        """For what is called thousands of times a second: the hook itself looks at `live`."""
        self._hooks.append(Hook(owner, name, hook))
        return self._hooks[-1]

    def remove(self) -> None:
        """Idempotent."""
        self.live = False
        while self._hooks:
            self._hooks.pop().off()
