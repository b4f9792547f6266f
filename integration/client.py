"""From an engine object, whatever kind it is, to the engine core's scheduler."""

from __future__ import annotations

from typing import Any

from integration.config import IntegrationError
from integration.engine_rpc import METHOD, kvq_rpc

NO_PLUGIN = (
    "the engine core process was started without kvq's plugin: install kvq-toolkit in the environment of the engine"
    " before it is constructed, and if VLLM_PLUGINS is set, add kvq to it"
)


class Connection:
    """Calls `kvq_rpc` of one engine. Raises IntegrationError with the engine's reason.

    `call` for engines in this process and for synchronous clients, `acall` for all.
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
            return _checked(await self._client.call_utility_async(METHOD, op, payload))
        except IntegrationError:
            raise
        except Exception as error:
            raise _explained(error) from error


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
