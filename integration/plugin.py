"""vLLM's entry point `kvq` in group `vllm.general_plugins`, loaded in every process of an engine. Dormant: it adds one
method to EngineCore, and enables retention in a new engine only if its environment or configuration asks for it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from integration.config import Config

log = logging.getLogger("vllm.kvq")


def register() -> None:
    """Idempotent. Raises nothing: a vLLM that this does not fit goes on without it, with a warning."""
    try:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCore

        from integration.engine_rpc import METHOD, kvq_rpc

        if getattr(EngineCore, METHOD, None) is not kvq_rpc:
            setattr(EngineCore, METHOD, kvq_rpc)
        _start_with(Scheduler)
    except Exception as error:
        log.warning("kvq does not fit this vLLM and stays out of it: %s", error)
        return
    _front_end()


def _start_with(scheduler_class: Any) -> None:
    """Have new schedulers enable retention if they are configured so."""
    construct = scheduler_class.__init__
    if getattr(construct, "kvq", False):
        return

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        start(self)

    constructed.kvq = True  # type: ignore[attr-defined]
    scheduler_class.__init__ = constructed


def start(scheduler: Any) -> None:
    """Enable retention in a new scheduler if its configuration asks for it. A wrong configuration raises ValueError and
    the engine does not start; where retention cannot work, or fails, it starts without and says why.
    """
    config = Config.from_environment(getattr(scheduler.vllm_config, "additional_config", None))
    if config is None:
        return
    from integration.scheduler import Retention, refusal

    reason = refusal(scheduler)
    if reason is not None:
        log.error("retention is not enabled: %s", reason)
        return
    try:
        Retention(scheduler, config)
    except ValueError:
        raise
    except Exception:
        log.exception("retention is not enabled: this is a fault of kvq's, and the engine starts without it")
    else:
        log.info("retention is enabled: %s", config)


def _front_end() -> None:
    try:
        from integration import frontend
    except ImportError:
        return
    try:
        frontend.install()
    except Exception as error:
        log.warning("kvq's part in the front end stays out of it: %s", error)
