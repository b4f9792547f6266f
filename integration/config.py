"""Settings of the integration: arguments of `enable`, or what a server finds in its environment."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class IntegrationError(ValueError):
    """What was asked for cannot be done here; the text says why and what to do."""


@dataclass(frozen=True)
class Config:
    """policy, budget, hard, max_wait_s, guardrail: as in `retention.make_policy`. settings: those of the policy's rule.

    events: file for the event log. state: file that keeps what was learned over restarts. tenant_trusted: take
    `kvq_tenant` from requests. Raises IntegrationError for a value of wrong type or size.
    """

    policy: str = "value"
    budget: float | None = None
    hard: bool | None = None
    events: str | None = None
    tenant_trusted: bool = False
    guardrail: bool = True
    max_wait_s: float = 10.0
    state: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("policy", self.policy, isinstance(self.policy, str), "a name")
        _check("budget", self.budget, self.budget is None or _number(self.budget, 1.0), "a fraction from 0 to 1")
        _check("hard", self.hard, self.hard is None or isinstance(self.hard, bool), "True, False or None")
        for name in ("events", "state"):
            value = getattr(self, name)
            _check(name, value, value is None or (isinstance(value, str) and value != ""), "a file name or None")
        for name in ("tenant_trusted", "guardrail"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        _check("max_wait_s", self.max_wait_s, _number(self.max_wait_s, math.inf), "seconds, at least 0")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """From keyword arguments or JSON. Unknown keys are settings of the policy, which checks them. "retention" may
        be there and must be true: there is nothing else to enable yet.
        """
        values = dict(values)
        if values.pop("retention", True) is not True:
            raise IntegrationError("retention must be True: it is what this version enables")
        known = {name: values.pop(name) for name in list(values) if name in cls.__dataclass_fields__}
        settings = known.pop("settings", {})
        if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
            raise IntegrationError(f"settings must be a mapping of names, got {settings!r:.80}")
        for name in ("events", "state"):
            if isinstance(known.get(name), os.PathLike):
                known[name] = os.fspath(known[name])
        return cls(**known, settings={**settings, **values})

    def to_mapping(self) -> dict[str, Any]:
        """The inverse of `from_mapping`, with values that JSON has."""
        values = asdict(self)
        return {**values.pop("settings"), **values}

    @classmethod
    def from_environment(cls, additional_config: object = None) -> Config | None:
        """What a server was asked for: vLLM's `additional_config["kvq"]`, else `KVQ_CONFIG` (JSON, or a file of it),
        else `KVQ_RETENTION=1` with all defaults; None for none of them. `KVQ_RETENTION=0` switches it off in any case.
        """
        switch = os.environ.get("KVQ_RETENTION", "").strip().lower()
        if switch in ("0", "false", "off", "no"):
            return None
        if switch not in ("", "1", "true", "on", "yes"):
            raise IntegrationError(f"KVQ_RETENTION must be 1 or 0, got {switch!r}")
        values = additional_config.get("kvq") if isinstance(additional_config, Mapping) else None
        source = 'additional_config["kvq"]'
        if values is None and (text := os.environ.get("KVQ_CONFIG", "").strip()):
            values, source = _read(text), "KVQ_CONFIG"
        if values is None:
            return cls() if switch else None
        if values is True:
            return cls()
        if values is False:
            return None
        if not isinstance(values, Mapping):
            raise IntegrationError(f"{source} must be a JSON object, got {values!r:.80}")
        if values.get("retention") is False:
            return None
        try:
            return cls.from_mapping(values)
        except IntegrationError as error:
            raise IntegrationError(f"{source}: {error}") from None


def _read(text: str) -> Any:
    try:
        if not text.startswith("{"):
            text = Path(text).read_text()
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise IntegrationError(f"KVQ_CONFIG must be a JSON object or a file that holds one: {error}") from None


def _number(value: object, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value <= high


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise IntegrationError(f"{name} must be {allowed}, got {value!r:.80}")
