from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retention.toolcalls import MAX_CALLS, ToolCall, args_class, parse, parse_tokens, tool_class

FORMATS = {
    "hermes": (
        'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la"}}\n</tool_call>',
        [("bash", "ls")],
    ),
    "hermes, two calls": (
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "b", "arguments": {"x": 1}}</tool_call>',
        [("a", ""), ("b", "")],
    ),
    "hermes, end tag cut by the stop token": ('<tool_call>\n{"name": "a", "arguments": {}}', [("a", "")]),
    "qwen3 coder": (
        "<tool_call>\n<function=run>\n<parameter=command>\nmake -j4\n</parameter>\n</function>\n</tool_call>",
        [("run", "make")],
    ),
    "llama3 json": ('<|python_tag|>{"name": "get", "parameters": {"q": "a;b"}}<|eom_id|>', [("get", "")]),
    "llama3 two": (
        '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
        [("a", ""), ("b", "")],
    ),
    "llama3 built-in": ('<|python_tag|>brave_search.call(query="x")<|eom_id|>', [("brave_search", "")]),
    "llama3 bare": ('{"name": "get", "parameters": {"q": "x"}}<|eot_id|>', [("get", "")]),
    "llama3 function": ('<function=get>{"q": "x"}</function>', [("get", "")]),
    "mistral list": ('[TOOL_CALLS] [{"name": "a", "arguments": {"command": "git status"}}]</s>', [("a", "git")]),
    "mistral named": ('[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]9[ARGS]{}', [("a", ""), ("b", "")]),
    "mistral short": ('[TOOL_CALLS]weather{"city": "Paris"}', [("weather", "")]),
    "openai message": (
        '{"role": "assistant", "tool_calls": [{"type": "function", '
        '"function": {"name": "f", "arguments": "{\\"cmd\\": \\"npm test\\"}"}}]}',
        [("f", "npm")],
    ),
    "openai list": ('[{"name": "f", "arguments": "{}"}]', [("f", "")]),
    "anthropic style input": ('{"type": "tool_use", "name": "Bash", "input": {"command": "cat x"}}', [("Bash", "cat")]),
    "after thinking": ('<think>hm</think><tool_call>{"name": "a", "arguments": {}}</tool_call>', [("a", "")]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_recognised(name):
    text, calls = FORMATS[name]
    assert parse(text) == tuple(ToolCall(*c) for c in calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 42.",
        '{"name": "Ada", "age": 36}',
        '<think><tool_call>{"name": "a", "arguments": {}}</tool_call></think>No tool needed.',
        '<tool_call>{"name": "a", "arguments": {"x": ',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm -rf; \\u0000", "arguments": {}}</tool_call>',
        "[TOOL_CALLS]",
        "<|python_tag|>print(1)",
        "<function=get>",
        "[" * 200_000,
        '{"a":' * 200_000,
        "<tool_call>" * 50_000,
        "<function=x>" * 50_000,
        None,
        b"bytes",
    ],
    ids=lambda t: repr(t)[:40],
)
def test_anything_else_is_no_tool_call(text):
    assert parse(text) == ()


PIECES = [
    "<tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "{",
    "}",
    '"name"',
    ":",
    '"x"',
    ",",
    '"arguments"',
    "[",
    "]",
    "<function=",
    ">",
    ";",
    "[ARGS]",
]


@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_text_makes_it_fail(text):
    for call in parse(text):
        assert call.name


def test_number_of_calls_is_bounded():
    assert len(parse('<tool_call>{"name": "a", "arguments": {}}</tool_call>' * 1000)) == MAX_CALLS


def test_token_ids_need_a_decoder_that_works():
    text = FORMATS["mistral short"][0]
    assert parse_tokens(list(text.encode()), lambda ids: bytes(ids).decode()) == (ToolCall("weather"),)

    def broken(ids):
        raise IndexError("no such token")

    assert parse_tokens([1, 2], broken) == ()
    assert parse_tokens([1, 2], lambda ids: None) == ()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pytest -x tests", "pytest"),
        ("cd /repo && FOO=1 python -m pytest", "python"),
        ("cd /repo; make", "make"),
        ("sudo /usr/bin/apt-get install x", "apt-get"),
        ("timeout 30 cargo test", "cargo"),
        ("cd /repo", "cd"),
        ("", ""),
        (["git", "status"], "git"),
        (5, ""),
    ],
)
def test_argument_class_is_the_program_of_the_command(command, expected):
    assert args_class({"command": command}) == expected
    assert args_class(json.dumps({"command": command})) == expected


def test_arguments_without_a_command_have_no_class():
    assert args_class({"path": "/x"}) == args_class(None) == args_class("not json") == args_class([1]) == ""


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Bash", "shell"), ("AskUserQuestion", "person"), ("Task", "agent"), ("WebFetch", "web"), ("Grep", "search"),
     ("str_replace_editor", "edit"), ("Read", "read"), ("frobnicate", "other"), ("", "other")],
)  # fmt: skip
def test_kind_of_a_tool(name, kind):
    assert tool_class(name) == kind
