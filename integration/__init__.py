"""Adapters that put kvq and retention into other people's engines.

Retention in a running vLLM: `enable(llm)`, `disable(llm)`, `status(llm)`; see docs/integration.md. `vllm serve` enables
it with `KVQ_RETENTION=1`. `integration.transformers_cache.KVQCache` is a transformers cache.

Nothing here is imported until it is asked for, so that each adapter needs only its own engine.
"""

from __future__ import annotations

from typing import Any

from integration.config import Config, IntegrationError

__all__ = [
    "Handle",
    "IntegrationError",
    "adisable",
    "aenable",
    "astatus",
    "disable",
    "enable",
    "generate",
    "hints",
    "receipt",
    "status",
]


class Handle:
    """Retention on one engine. As a context manager it is disabled at the end, also of an `async with`."""

    def __init__(self, engine: Any, connection: Any) -> None:
        self._engine = engine
        self.connection = connection

    def status(self) -> dict[str, Any]:
        """Leases, budget, guardrail, counters, versions; `enabled` is False after a fault, which `faults` names."""
        return self.connection.call("status")

    def metrics(self) -> dict[str, Any]:
        """{name: number}, or {name: {"label=value": number}}."""
        return self.connection.call("metrics")

    def programs(self) -> list[dict[str, Any]]:
        """The programs and what is retained of them, the most recently active first."""
        return self.connection.call("programs")["programs"]

    def release(self, program_id: str, tenant: str = "") -> None:
        """The program is over: let go of its KV now."""
        self.connection.call("release", program_id=program_id, tenant=tenant)

    def disable(self) -> dict[str, Any]:
        """Restore the engine; returns its last status. Idempotent."""
        _listen(self._engine, False)
        return self.connection.call("disable")

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    async def __aenter__(self) -> Handle:
        return self

    async def __aexit__(self, *error: object) -> None:
        await adisable(self._engine)


def enable(llm: Any, retention: bool = True, **settings: Any) -> Handle:
    """Retention in a running engine: LLM, LLMEngine, or an engine core client. `await aenable(...)` for an AsyncLLM.

    settings, all optional: policy ("value", "fixed", "ema", "continuum", "trtllm" or "lru"), budget (fraction of the
    KV blocks that may be retained; default 0.5 for hard leases and all for soft ones), hard (leases hold references),
    events (file for the event log), tenant_trusted (take `kvq_tenant` from requests), guardrail (switch off when plain
    LRU does better), max_wait_s (a hard lease yields to a request that has waited so long), state (file that keeps what
    was learned), and the settings of the policy. docs/retention.md explains them.

    Raises IntegrationError, a ValueError, for a wrong setting, a foreign object, an engine that is enabled already, an
    engine core process without the plugin, a vLLM or model that retention cannot work with; the text says what to do.
    """
    connection = _connect(llm)
    connection.call("enable", **_config(retention, settings))
    _listen(llm, True)
    return Handle(llm, connection)


async def aenable(llm: Any, retention: bool = True, **settings: Any) -> Handle:
    """`enable` for an AsyncLLM."""
    connection = _connect(llm)
    await connection.acall("enable", **_config(retention, settings))
    _listen(llm, True)
    return Handle(llm, connection)


def disable(llm: Any) -> dict[str, Any]:
    """End all leases and restore the engine exactly; returns the last status. Idempotent."""
    connection = _connect(llm)
    _listen(llm, False)
    return connection.call("disable")


async def adisable(llm: Any) -> dict[str, Any]:
    """`disable` for an AsyncLLM."""
    connection = _connect(llm)
    _listen(llm, False)
    return await connection.acall("disable")


def status(llm: Any) -> dict[str, Any]:
    """Whether retention is on, and all about it; where it is off, `refused` says what is against it."""
    return _connect(llm).call("status")


async def astatus(llm: Any) -> dict[str, Any]:
    """`status` for an AsyncLLM."""
    return await _connect(llm).acall("status")


def __getattr__(name: str) -> Any:
    if name in ("generate", "hints", "receipt"):
        from integration import frontend

        return getattr(frontend, name)
    raise AttributeError(f"module 'integration' has no attribute {name!r}")


def _connect(llm: Any) -> Any:
    from integration.client import connect

    return connect(llm)


def _listen(engine: Any, on: bool) -> None:
    """Have the engine's front end, where it is in this process, tell the core about tool calls in finished outputs."""
    from integration import frontend

    if hasattr(getattr(engine, "llm_engine", engine), "output_processor"):
        (frontend.attach if on else frontend.detach)(engine)


def _config(retention: bool, settings: dict[str, Any]) -> dict[str, Any]:
    return Config.from_mapping({"retention": retention, **settings}).to_mapping()
