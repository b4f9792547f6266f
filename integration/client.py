"""From an engine object, whatever kind it is, to the engine core's scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from integration.config import IntegrationError
from integration.engine_rpc import METHOD, kvq_rpc

NO_PLUGIN = (
    "the engine core process was started without kvq's plugin: install kvq-toolkit in the environment of the engine"
    " before it is constructed, and if VLLM_PLUGINS is set, add kvq to it"
)


class Connection:
    """Calls `kvq_rpc` of an engine. Raises IntegrationError with the engine's reason.

    `call` for engines in this process and for synchronous clients, `acall` for all. With data parallelism an AsyncLLM
    has several engine cores: all of them do what is asked, and `merged` says what comes back.
    """

    def __init__(self, client: Any, core: Any) -> None:
        self._client, self._core = client, core

    @property
    def needs_await(self) -> bool:
        """Whether only `acall` works: an AsyncLLM's engine core is reached through its event loop."""
        return self._core is None and not hasattr(self._client, "call_utility")

    def call(self, op: str, **payload: Any) -> dict[str, Any]:
        if self._core is not None:
            return _checked(kvq_rpc(self._core, op, payload))
        if self.needs_await:
            raise IntegrationError("this engine is asynchronous: await integration.aenable(...) and the like instead")
        try:
            return _checked(self._client.call_utility(METHOD, op, payload))
        except IntegrationError:
            raise
        except Exception as error:
            raise _explained(error) from error

    async def acall(self, op: str, **payload: Any) -> dict[str, Any]:
        if not self.needs_await:
            return self.call(op, **payload)
        try:
            return merged(op, [_checked(answer) for answer in await self._ask_all(op, payload)])
        except IntegrationError:
            raise
        except Exception as error:
            raise _explained(error) from error

    async def _ask_all(self, op: str, payload: dict[str, Any]) -> Sequence[Any]:
        cores = getattr(self._client, "core_engines", ())
        ask = getattr(self._client, "_call_utility_async", None)  # `call_utility_async` returns the first one's answer
        if len(cores) < 2 or ask is None:
            return [await self._client.call_utility_async(METHOD, op, payload)]
        answers = await asyncio.gather(*[ask(METHOD, op, payload, engine=core) for core in cores])
        if op == "enable":
            begun = [core for core, answer in zip(cores, answers) if isinstance(answer, dict) and "error" not in answer]
            if len(begun) < len(cores):  # all of them or none
                await asyncio.gather(*[ask(METHOD, "disable", {}, engine=core) for core in begun])
        return answers


def merged(op: str, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer for several engine cores. metrics: sums, but `kvq_enabled` is the lowest, and `kvq_guardrail_off`
    and `kvq_memory_price` are the highest. programs: all, each with its `engine`. tool_called: whether any knows the
    request. release: how many were released in all. Else the first one's answer, with all of them under "engines".
    """
    if len(answers) == 1:
        return answers[0]
    if op == "metrics":
        total: dict[str, Any] = {}
        for answer in answers:
            for name, value in answer.items():
                if isinstance(value, dict):
                    labelled = total.setdefault(name, {})
                    for label, number in value.items():
                        labelled[label] = labelled.get(label, 0.0) + number
                else:
                    total[name] = total.get(name, 0.0) + value
        for name, choose in (("kvq_enabled", min), ("kvq_guardrail_off", max), ("kvq_memory_price", max)):
            total[name] = choose(answer.get(name, 0.0) for answer in answers)
        return total
    if op == "programs":
        return {"programs": [{**row, "engine": i} for i, answer in enumerate(answers) for row in answer["programs"]]}
    if op == "tool_called":
        return {"known": any(answer["known"] for answer in answers)}
    if op == "release":
        return {"released": sum(answer["released"] for answer in answers)}
    return {**answers[0], "enabled": all(answer["enabled"] for answer in answers), "engines": list(answers)}


def connect(engine: Any) -> Connection:
    """engine: LLM, LLMEngine, AsyncLLM, an engine core client, an EngineCore, or a Connection.
    Raises IntegrationError for anything else, naming what it is.
    """
    if isinstance(engine, Connection):
        return engine
    try:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.engine.core_client import EngineCoreClient
    except ImportError as error:
        raise IntegrationError(f"vLLM cannot be used here: {error}") from error
    client = engine
    for attribute in ("llm_engine", "engine_core"):
        if not isinstance(client, (EngineCoreClient, EngineCore)):
            client = getattr(client, attribute, client)
    if isinstance(client, EngineCoreClient) and isinstance(getattr(client, "engine_core", None), EngineCore):
        client = client.engine_core
    if isinstance(client, EngineCore):
        return Connection(None, client)
    if isinstance(client, EngineCoreClient) and (
        hasattr(client, "call_utility") or hasattr(client, "call_utility_async")
    ):
        return Connection(client, None)
    raise IntegrationError(
        f"engine must be a vLLM LLM, LLMEngine, AsyncLLM or engine core client, got {type(engine).__module__}."
        f"{type(engine).__qualname__}"
    )


def _checked(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise IntegrationError(f"the engine core answered {answer!r:.80}")
    if "error" in answer:
        raise IntegrationError(str(answer["error"]))
    return answer


def _explained(error: Exception) -> IntegrationError:
    text = str(error)
    return IntegrationError(NO_PLUGIN if METHOD in text and "attribute" in text else f"the engine core failed: {text}")
