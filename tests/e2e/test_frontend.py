"""The front end without an engine: hints, receipts, tool calls in text, what is told to the core."""

from __future__ import annotations

import ast
import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration import frontend
from retention import HintReader
from retention.toolcalls import ToolCall


def test_hints_are_the_keys_that_the_reader_knows():
    given = frontend.hints(
        program_id="p", tool_name="bash", tool_pending=True, ttl_s=3, priority=50, release=True, tenant="t"
    )
    program, read = HintReader(trust_tenant=True).read(given)
    assert (program.program_id, program.tenant) == ("p", "t")
    assert (read.tool, read.tool_pending, read.ttl_s, read.priority, read.release) == ("bash", True, 3, 50, True)
    assert frontend.hints() == {}
    assert frontend.hints(turn_starts=(0, 5)) == {"kvq_turn_starts": [0, 5]}
    # What vllm_xargs admits: no booleans, no nesting.
    assert all(type(value) in (str, int, float) for value in given.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("program_id", ""),
        ("program_id", 7),
        ("tool_name", "x" * 257),
        ("ttl_s", -1),
        ("ttl_s", float("inf")),
        ("ttl_s", float("nan")),
        ("ttl_s", True),
        ("priority", 101),
        ("priority", "high"),
        ("tool_pending", 2),
        ("release", "yes"),
        ("turn_starts", [5, 3]),
        ("turn_starts", [1.5]),
    ],
)
def test_a_wrong_hint_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        frontend.hints(**{name: value})


class FakeLLM:
    def generate(self, prompts: Any, sampling: Any, **kwargs: Any) -> Any:
        self.prompts, self.sampling, self.kwargs = prompts, sampling, kwargs
        return ["output"]


def test_generate_adds_hints_to_copies_of_the_parameters():
    vllm = pytest.importorskip("vllm")
    llm = FakeLLM()
    params = vllm.SamplingParams(max_tokens=3, extra_args={"own": 1})
    frontend.generate(llm, ["a", "b"], params, program_id=["x", "y"], tool_name="bash", use_tqdm=False)
    assert [p.extra_args for p in llm.sampling] == [
        {"own": 1, "kvq_program_id": "x", "kvq_tool_name": "bash"},
        {"own": 1, "kvq_program_id": "y", "kvq_tool_name": "bash"},
    ]
    assert params.extra_args == {"own": 1} and llm.kwargs == {"use_tqdm": False}
    assert frontend.generate(llm, "one prompt", params, release=True) == ["output"]
    assert llm.sampling.extra_args == {"own": 1, "kvq_release": 1}
    with pytest.raises(ValueError, match="program_id must be 2 entries"):
        frontend.generate(llm, ["a", "b"], params, program_id=["x"])
    with pytest.raises(ValueError, match="sampling_params must be 2 entries"):
        frontend.generate(llm, ["a", "b"], [params])


def test_a_receipt_is_found_in_objects_and_in_json():
    receipt = {"program": "p", "retained": True}
    assert frontend.receipt(SimpleNamespace(kv_transfer_params={"kvq": receipt})) == receipt
    assert frontend.receipt({"kv_transfer_params": {"kvq": receipt}}) == receipt
    for empty in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {"other": 1}}, SimpleNamespace()):
        assert frontend.receipt(empty) is None


HERMES = '<tool_call>{"name": "bash", "arguments": {"command": "pytest -q"}}</tool_call>'


class Words:
    """A tokenizer whose tokens are words; 0 marks a call and is special, as in Mistral's."""

    all_special_ids = (0, 1)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join({0: "[TOOL_CALLS]", 1: "</s>", 2: 'grep{"path": "."}', 3: "text"}[i] for i in ids)


def detokenizer(text: str, ids: list[int] | None = None) -> SimpleNamespace:
    return SimpleNamespace(output_text=text, output_token_ids=ids or [3, 1])


def test_tool_calls_are_found_in_the_text_or_in_its_special_tokens():
    assert frontend.tool_calls(detokenizer(HERMES), None) == (ToolCall("bash", "pytest"),)
    assert frontend.tool_calls(detokenizer("no call"), Words()) == ()
    assert frontend.tool_calls(detokenizer('grep{"path": "."}', [0, 2, 1]), Words()) == (ToolCall("grep"),)
    # Without text nobody knows.
    assert frontend.tool_calls(None, None) is None
    assert frontend.tool_calls(SimpleNamespace(output_token_ids=[3]), None) is None


def test_what_the_formats_do_not_know_is_left_to_the_servers_parser(monkeypatch):
    pytest.importorskip("vllm")
    call = SimpleNamespace(function=SimpleNamespace(name="odd", arguments='{"command": "ls -l"}'))

    class ToolParser:
        def __init__(self, tokenizer: Any) -> None:
            pass

        def extract_tool_calls(self, text: str, request: Any) -> Any:
            if "odd" not in text:
                raise RuntimeError("cannot parse")
            return SimpleNamespace(tool_calls=[call])

    parser = SimpleNamespace(tool_parser_cls=ToolParser)
    monkeypatch.setattr(frontend, "_tool_parser", None)
    assert frontend._remember_parser(lambda: parser) is parser
    assert frontend._remember_parser(lambda: None) is None  # of an endpoint without tools: the first stays
    assert frontend.tool_calls(detokenizer("odd"), Words()) == (ToolCall("odd", "ls"),)
    assert frontend.tool_calls(detokenizer("else"), Words()) == ()


class Processor:
    """As vLLM's OutputProcessor, as far as the front end touches it."""

    tokenizer = None

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.finished: list[str] = []

    def add_request(self, request: Any, prompt: Any) -> None:
        self.request_states[request.request_id] = SimpleNamespace(
            request_id=request.request_id, detokenizer=detokenizer("")
        )

    def _finish_request(self, state: Any) -> None:
        self.finished.append(self.request_states.pop(state.request_id).request_id)


class Connection:
    def __init__(self, needs_await: bool = False) -> None:
        self.needs_await, self.told = needs_await, []

    def call(self, op: str, **payload: Any) -> dict[str, Any]:
        self.told.append((op, payload))
        return {}

    async def acall(self, op: str, **payload: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return self.call(op, **payload)


@pytest.fixture
def attached(monkeypatch):
    """(engine, connection): an engine whose front end is attached."""
    pytest.importorskip("vllm")
    engine, connection = SimpleNamespace(output_processor=Processor()), Connection()
    monkeypatch.setattr("integration.client.connect", lambda engine: connection)
    frontend.attach(engine)
    return engine, connection


def finish(engine: Any, request_id: str, text: str, **extra: Any) -> None:
    processor = engine.output_processor
    processor.add_request(
        SimpleNamespace(request_id=request_id, sampling_params=SimpleNamespace(extra_args=extra or None)), None
    )
    state = processor.request_states[request_id]
    state.detokenizer.output_text = text
    processor._finish_request(state)


def test_the_core_is_told_about_calls_and_about_programs_that_call_nothing(attached):
    engine, connection = attached
    finish(engine, "plain", "no call")
    finish(engine, "hinted", "no call", kvq_program_id="p", kvq_tool_name="bash")
    assert connection.told == []
    finish(engine, "calls", HERMES)
    finish(engine, "person", "How do you do?", kvq_program_id="p")
    call = {"name": "bash", "args_class": "pytest"}
    assert connection.told == [
        ("tool_called", {"request_id": "calls", "finished": True, "calls": [call]}),
        ("tool_called", {"request_id": "person", "finished": True, "calls": []}),
    ]
    assert engine.output_processor.finished == ["plain", "hinted", "calls", "person"]


def test_an_asynchronous_engine_is_told_from_its_loop(attached):
    engine, connection = attached
    connection.needs_await = True

    async def serve() -> None:
        finish(engine, "calls", HERMES)
        assert connection.told == []
        for _ in range(3):
            await asyncio.sleep(0)
        assert [payload["request_id"] for _, payload in connection.told] == ["calls"]

    asyncio.run(serve())


def test_attach_is_idempotent_and_detach_restores(attached):
    engine, connection = attached
    frontend.attach(engine)
    finish(engine, "once", HERMES)
    assert len(connection.told) == 1
    frontend.detach(engine)
    frontend.detach(engine)
    assert not {"add_request", "_finish_request"} & set(vars(engine.output_processor))
    finish(engine, "silent", HERMES)
    assert len(connection.told) == 1


def test_a_fault_of_ours_leaves_the_engine_serving(attached, monkeypatch, caplog):
    engine, connection = attached
    monkeypatch.setattr(frontend, "parse", lambda text: 1 / 0)
    with caplog.at_level(logging.ERROR):
        finish(engine, "first", HERMES)
        finish(engine, "second", HERMES)
    assert engine.output_processor.finished == ["first", "second"] and connection.told == []
    assert len([record for record in caplog.records if "switched off after a fault" in record.message]) == 1


def test_engines_are_attached_only_if_asked_for(monkeypatch):
    attached = []
    monkeypatch.setattr(frontend, "attach", attached.append)
    monkeypatch.setattr("integration.exporter.publish", lambda engine: None)
    for name in ("KVQ_RETENTION", "KVQ_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    class Engine:
        def __init__(self, additional_config: Any) -> None:
            self.vllm_config = SimpleNamespace(additional_config=additional_config)

    frontend._wrap_once(Engine, "__init__", frontend._constructed)
    frontend._wrap_once(Engine, "__init__", frontend._constructed)
    Engine({})
    assert attached == []
    engine = Engine({"kvq": {"policy": "value"}})
    assert attached == [engine]
    monkeypatch.setenv("KVQ_RETENTION", "1")
    Engine({})
    assert len(attached) == 2
    monkeypatch.setenv("KVQ_RETENTION", "perhaps")  # the core refuses to start; here it must not raise
    Engine({})
    assert len(attached) == 2


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0", "installed"])
def test_what_the_front_end_hooks_is_there_in(version):
    """Read, not imported: class members and the attributes that `__init__` sets."""
    if version == "installed":
        root = Path(pytest.importorskip("vllm").__file__).parent
    else:
        pytest.importorskip("pip._internal.network.lazy_wheel")
        from tests.integration.vllm_sources import vllm_sources

        try:
            root = vllm_sources(version) / "vllm"
        except OSError as error:
            pytest.skip(f"no sources of vLLM {version}: {error}")

    def members(file: str, name: str) -> tuple[dict[str, int], str]:
        text = (root / file).read_text()
        (cls,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
        functions = [node for node in cls.body if isinstance(node, ast.FunctionDef)]
        return {node.name: len(node.args.args) for node in functions}, ast.unparse(cls)

    methods, body = members("v1/engine/output_processor.py", "OutputProcessor")
    assert methods["_finish_request"] == 2 and methods["add_request"] >= 3
    assert "self.request_states" in body and "self.tokenizer = tokenizer" in body
    assert "self._finish_request(req_state)" in body
    for file, name in (("v1/engine/async_llm.py", "AsyncLLM"), ("v1/engine/llm_engine.py", "LLMEngine")):
        _, body = members(file, name)
        assert "self.output_processor = " in body and "self.vllm_config = vllm_config" in body
    methods, _ = members("parser/parser_manager.py", "ParserManager")
    assert "get_parser" in methods
    assert "tool_parser_cls" in members("parser/abstract_parser.py", "Parser")[1]
    methods, body = members("tool_parsers/abstract_tool_parser.py", "ToolParser")
    assert methods["extract_tool_calls"] == 3 and "tools: list[Tool] | None=None" in body
    assert "output_text" in members("v1/engine/detokenizer.py", "BaseIncrementalDetokenizer")[1]


def test_the_package_offers_them_by_name():
    import integration

    assert integration.hints is frontend.hints and integration.receipt is frontend.receipt
    assert integration.generate is frontend.generate
    assert {"hints", "receipt", "generate"} <= set(integration.__all__)
