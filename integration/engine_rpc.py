"""The one method that this package adds to vLLM's EngineCore: `kvq_rpc(op, payload)`, with values that msgpack has.

Clients of every kind reach it: directly in process, else by name through vLLM's utility calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from integration import compat
from integration.config import Config, IntegrationError
from retention import ToolCall
from retention.toolcalls import args_class

log = logging.getLogger("vllm.kvq")

METHOD = "kvq_rpc"
MAX_TEXT = 256


def kvq_rpc(core: Any, op: str, payload: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Do `op` on the engine core's scheduler. Never raises: what goes wrong comes back as {"error": text}.

    enable(**config) · disable · status · metrics · programs · tool_called(request_id | program_id[, tenant], calls,
    finished) · release(program_id[, tenant]).
    """
    try:
        if op not in OPS:
            raise IntegrationError(f"op must be one of {', '.join(OPS)}, got {op!r}")
        return OPS[op](core.scheduler, dict(payload or {}))
    except ValueError as error:
        return {"error": str(error)}
    except Exception as error:
        log.exception("kvq_rpc %s failed", op)
        return {"error": f"{type(error).__name__}: {error}"}


def _enable(scheduler: Any, payload: dict[str, Any]) -> dict[str, Any]:
    from integration.scheduler import Retention

    return Retention(scheduler, Config.from_mapping(payload)).status()


def _disable(scheduler: Any, payload: dict[str, Any]) -> dict[str, Any]:
    from integration.scheduler import forget, on

    retention = on(scheduler)
    if retention is None:
        last = _off(scheduler)
        forget(scheduler)
        return last
    last = retention.status()
    retention.disable()
    return {**last, "enabled": False}


def _status(scheduler: Any, payload: dict[str, Any]) -> dict[str, Any]:
    from integration.scheduler import on

    retention = on(scheduler)
    return _off(scheduler) if retention is None else retention.status()


def _metrics(scheduler: Any, payload: dict[str, Any]) -> dict[str, Any]:
    from integration.scheduler import faults, on

    retention = on(scheduler)
    if retention is None:
        return {"kvq_enabled": 0.0, "kvq_faults_total": float(len(faults(scheduler)))}
    return retention.metrics()


def _programs(scheduler: Any, payload: dict[str, Any]) -> dict[str, Any]:
    from integration.scheduler import on

    retention = on(scheduler)
    return {"programs": [] if retention is None else retention.programs()}


def _tool_called(scheduler: Any, payload: dict[str, Any]) -> dict[str, Any]:
    from integration.scheduler import on

    calls = payload.get("calls") or ()
    if not isinstance(calls, (list, tuple)) or not all(isinstance(c, Mapping) and _text(c.get("name")) for c in calls):
        raise IntegrationError(
            f'calls must be a list of {{"name": text, "arguments" or "args_class": ...}}, got {calls!r:.80}'
        )
    request_id, program_id = payload.get("request_id"), payload.get("program_id")
    if (request_id is None) == (program_id is None):
        raise IntegrationError("tool_called needs request_id or program_id, and not both")
    retention = on(scheduler)
    if retention is None:
        return {"known": False}
    return retention.guarded(
        retention.tool_called,
        [ToolCall(c["name"][:64], str(c.get("args_class") or args_class(c.get("arguments")))[:64]) for c in calls],
        request_id=request_id,
        program_id=program_id,
        tenant=payload.get("tenant") or "",
        complete=bool(payload.get("finished")),
    )


def _release(scheduler: Any, payload: dict[str, Any]) -> dict[str, Any]:
    from integration.scheduler import on

    if not _text(payload.get("program_id")):
        raise IntegrationError(f"program_id must be text, got {payload.get('program_id')!r:.80}")
    retention = on(scheduler)
    if retention is None:
        return {"released": 0}
    return retention.guarded(retention.release, payload["program_id"], payload.get("tenant") or "")


OPS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "enable": _enable,
    "disable": _disable,
    "status": _status,
    "metrics": _metrics,
    "programs": _programs,
    "tool_called": _tool_called,
    "release": _release,
}


def _off(scheduler: Any) -> dict[str, Any]:
    from integration.scheduler import faults, refusal

    return {
        "enabled": False,
        "vllm": compat.vllm_version(),
        "kvq": compat.own_version(),
        "faults": faults(scheduler),
        "refused": refusal(scheduler),
    }


def _text(value: object) -> bool:
    return isinstance(value, str) and value != ""
