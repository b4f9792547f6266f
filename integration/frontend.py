"""What happens beside the engine core, in the process that sees text: hints on requests, receipts on answers, and the
tool calls of finished requests, told to the core.

The core sees token ids only, and a request that ends with a stop string looks to it like one whose client went away:
the front end finds the string and aborts the request. So the front end says that the request ended as it should, and
which tools it called.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from retention.hints import MAX_TEXT
from retention.toolcalls import ToolCall, args_class, parse, parse_tokens

log = logging.getLogger(__name__)

_tool_parser: Any = None  # what `--tool-call-parser` names, a class derived from vLLM's ToolParser


def hints(
    *,
    program_id: str | None = None,
    tool_name: str | None = None,
    tool_pending: bool | None = None,
    ttl_s: float | None = None,
    priority: int | None = None,
    release: bool = False,
    tenant: str | None = None,
    turn_starts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The hints of one request as flat keys, for `SamplingParams.extra_args` and, over HTTP, `vllm_xargs`.

    program_id: the agent's name, the same in all its turns. tool_name: the tool that will run after this turn.
    tool_pending: the turn ends in a tool call even if none is recognised in its text. ttl_s: keep the KV cache so many
    seconds. priority: 0 to 100, 35 is neutral. release: this is the program's last turn. tenant: owner, where the
    server trusts it. turn_starts: token indices where turns of the prompt begin.
    Raises ValueError naming the argument for anything else.
    """
    given: dict[str, Any] = {}
    for name, value in (("program_id", program_id), ("tool_name", tool_name), ("tenant", tenant)):
        if value is not None:
            _require(name, value, isinstance(value, str) and 0 < len(value) <= MAX_TEXT, f"1 to {MAX_TEXT} characters")
            given[f"kvq_{name}"] = value
    for name, number, high in (("ttl_s", ttl_s, math.inf), ("priority", priority, 100)):
        if number is not None:
            good = isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number <= high
            _require(
                name, number, good and math.isfinite(number), f"a number from 0{f' to {high}' if high == 100 else ''}"
            )
            given[f"kvq_{name}"] = number
    for name, flag in (("tool_pending", tool_pending), ("release", release or None)):
        if flag is not None:
            _require(name, flag, isinstance(flag, bool), "True or False")
            given[f"kvq_{name}"] = int(flag)  # as it arrives over HTTP
    if turn_starts is not None:
        starts = list(turn_starts)
        good = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in starts) and starts == sorted(
            starts
        )
        _require("turn_starts", turn_starts, good, "ascending token indices")
        given["kvq_turn_starts"] = starts
    return given


def generate(
    llm: Any,
    prompts: Any,
    sampling_params: Any = None,
    *,
    program_id: str | Sequence[str] | None = None,
    tool_name: str | Sequence[str | None] | None = None,
    tool_pending: bool | None = None,
    ttl_s: float | None = None,
    priority: int | None = None,
    release: bool = False,
    tenant: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """`llm.generate` with hints. program_id and tool_name may be lists, one entry a prompt; the others hold for all.

    llm: a `vllm.LLM`. kwargs go to its `generate`. Returns its outputs; `receipt(output)` says what was retained.
    The sampling parameters that were passed in are not changed. Raises ValueError for hints that are not valid, and for
    lists whose length is not the number of prompts.
    """
    from vllm import SamplingParams

    count = len(prompts) if isinstance(prompts, (list, tuple)) else 1
    if sampling_params is None:
        sampling_params = llm.get_default_sampling_params()
    sampling = list(sampling_params) if isinstance(sampling_params, (list, tuple)) else [sampling_params] * count
    for name, value in (("program_id", program_id), ("tool_name", tool_name), ("sampling_params", sampling)):
        _require(name, value, not isinstance(value, (list, tuple)) or len(value) == count, f"{count} entries")
    hinted: list[SamplingParams] = []
    for i, params in enumerate(sampling):
        keys = hints(
            program_id=program_id[i] if isinstance(program_id, (list, tuple)) else program_id,  # type: ignore[arg-type]
            tool_name=tool_name[i] if isinstance(tool_name, (list, tuple)) else tool_name,  # type: ignore[arg-type]
            tool_pending=tool_pending,
            ttl_s=ttl_s,
            priority=priority,
            release=release,
            tenant=tenant,
        )
        params = params.clone()
        params.extra_args = {**(params.extra_args or {}), **keys}
        hinted.append(params)
    return llm.generate(prompts, hinted if isinstance(prompts, (list, tuple)) else hinted[0], **kwargs)


def receipt(answer: Any) -> dict[str, Any] | None:
    """What was retained of a finished request: {"program", "retained", "reason", "blocks", "ttl_s", "reused_tokens",
    "lease"}, or None where there is none (no program, streaming, or ended by a stop string before the core knew).

    answer: a `RequestOutput`, or a response of the OpenAI-compatible server as object or dictionary.
    """
    params = (
        answer.get("kv_transfer_params") if isinstance(answer, Mapping) else getattr(answer, "kv_transfer_params", None)
    )
    return params.get("kvq") if isinstance(params, Mapping) else None


def attach(engine: Any) -> None:
    """Tell the engine's core about the tool calls of its requests. engine: `LLM`, `LLMEngine` or `AsyncLLM`.
    Idempotent. Raises IntegrationError for anything else.
    """
    engine = getattr(engine, "llm_engine", engine)
    if getattr(engine, "_kvq_listener", None) is None:
        engine._kvq_listener = _Listener(engine)


def detach(engine: Any) -> None:
    """Undo `attach`. Idempotent."""
    engine = getattr(engine, "llm_engine", engine)
    listener = getattr(engine, "_kvq_listener", None)
    if listener is not None:
        listener.close()
        engine._kvq_listener = None


def install() -> None:
    """Called by the plugin in every process: engines that are constructed from now on, and whose configuration asks
    for retention, are attached and publish kvq's metrics. Idempotent; never raises.
    """
    try:
        from vllm.parser import ParserManager
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.llm_engine import LLMEngine

        _wrap_once(AsyncLLM, "__init__", _constructed)
        _wrap_once(LLMEngine, "__init__", _constructed)
        _wrap_once(ParserManager, "get_parser", _remember_parser)
    except Exception:
        log.exception("kvq: no front end hooks in this process; tool calls are not recognised in output text")


def _constructed(init: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    init(engine, *args, **kwargs)
    try:
        from integration import exporter
        from integration.config import Config

        if Config.from_environment(engine.vllm_config.additional_config) is not None:
            attach(engine)
            exporter.publish(engine)
    except Exception:
        log.exception("kvq: the front end was not attached; tool calls are not recognised in output text")


def _remember_parser(get_parser: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _tool_parser
    parser = get_parser(*args, **kwargs)
    _tool_parser = getattr(parser, "tool_parser_cls", None) or _tool_parser
    return parser


def _wrap_once(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = owner.__dict__[name]
    bound = isinstance(original, classmethod)
    function = original.__func__ if bound else original
    if hasattr(function, "_kvq"):
        return

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    wrapped._kvq = True  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(wrapped) if bound else wrapped)


class _Listener:
    """Watches the finished requests of one engine."""

    def __init__(self, engine: Any) -> None:
        from integration.client import connect

        self._connection = connect(engine)
        self._processor = engine.output_processor
        self._add_request = self._processor.add_request
        self._finish_request = self._processor._finish_request
        self._processor.add_request = self._added
        self._processor._finish_request = self._finished
        self._notices: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """The methods of the class show again."""
        for name in ("add_request", "_finish_request"):
            vars(self._processor).pop(name, None)

    def _added(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._add_request(request, *args, **kwargs)
        state = self._processor.request_states.get(request.request_id)
        if state is not None:
            extra = getattr(request.sampling_params, "extra_args", None) or {}
            known = extra.get("kvq_program_id") or getattr(request, "session_id", None)
            hinted = extra.get("kvq_tool_name") or extra.get("kvq_tool_pending")
            state._kvq_asks = bool(known and not hinted)  # also if it calls no tool: a person is next then
        return result

    def _finished(self, state: Any) -> None:
        self._finish_request(state)
        try:
            calls = tool_calls(state.detokenizer, self._processor.tokenizer)
            if calls is not None and (calls or getattr(state, "_kvq_asks", False)):
                self._tell(state.request_id, calls)
        except Exception:
            self.close()
            log.exception("kvq: the front end is switched off after a fault; the engine goes on")

    def _tell(self, request_id: str, calls: Iterable[ToolCall]) -> None:
        notice = {"request_id": request_id, "finished": True, "calls": [call._asdict() for call in calls]}
        if not self._connection.needs_await:
            self._connection.call("tool_called", **notice)
            return
        task = asyncio.get_running_loop().create_task(self._send(notice))
        self._notices.add(task)  # the loop itself keeps no reference to it
        task.add_done_callback(self._notices.discard)

    async def _send(self, notice: dict[str, Any]) -> None:
        try:
            await self._connection.acall("tool_called", **notice)
        except Exception as error:  # the engine is gone, or retention has failed and said so
            log.debug("kvq: tool_called was not taken: %s", error)


def tool_calls(detokenizer: Any, tokenizer: Any) -> tuple[ToolCall, ...] | None:
    """The calls in a finished request's output, None where there is no text to look at.

    First by retention's own formats; what they do not know is left to the server's tool parser, if it has one.
    """
    text = getattr(detokenizer, "output_text", None)
    if not text:
        return None
    calls = parse(text)
    if not calls and tokenizer is not None:
        # Llama 3 and Mistral mark calls with special tokens, which the text does not show.
        ids = list(detokenizer.output_token_ids)
        special = set(getattr(tokenizer, "all_special_ids", ()))
        if any(i in special for i in ids[:-1]):
            calls = parse_tokens(ids, functools.partial(tokenizer.decode, skip_special_tokens=False))
    if not calls and _tool_parser is not None and tokenizer is not None:
        calls = _by_server(text, tokenizer)
    return calls


def _by_server(text: str, tokenizer: Any) -> tuple[ToolCall, ...]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    try:
        found = _tool_parser(tokenizer).extract_tool_calls(text, ChatCompletionRequest(model="", messages=[]))
        return tuple(ToolCall(c.function.name, args_class(c.function.arguments)) for c in found.tool_calls)
    except Exception as error:  # parsers raise what they like on what a model may write
        log.debug("kvq: the tool parser did not take an output: %s", error)
        return ()


def _require(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name} must be {allowed}, got {value!r:.80}")
