"""Tool calls: what a program waits for between two turns, found in what the model wrote.

Formats: Hermes and Qwen (`<tool_call>` with JSON, or the XML of Qwen3-Coder), Llama 3 (`<|python_tag|>`, bare JSON,
`<function=...>`), Mistral (`[TOOL_CALLS]`, both forms), and OpenAI-style JSON. Anything else is no tool call. Nothing
here raises on what a model may write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

MAX_CHARS = 1 << 18  # only the end of a longer output is looked at
MAX_NAME = 64
MAX_CALLS = 32
_SEPARATOR = re.compile(r"[\s;]*")


class ToolCall(NamedTuple):
    """One call. `args_class` is a coarse class of the arguments ("pytest", "ls"), "" when there is none."""

    name: str
    args_class: str = ""


# How the words of tool names begin, first match wins. Durations differ far more between these than inside them.
_CLASSES = (
    ("agent", ("task", "agent", "subagent", "delegate", "subtask")),
    ("shell", ("bash", "shell", "exec", "terminal", "command", "cmd", "python", "code", "interpreter")),
    ("web", ("web", "http", "fetch", "brows", "url", "download", "crawl")),
    ("search", ("grep", "glob", "search", "find", "retriev", "lookup")),
    ("edit", ("edit", "write", "patch", "create", "insert", "delete", "update", "todo")),
    ("read", ("read", "view", "open", "cat", "list", "ls", "get")),
)
_PERSON = ("askuser", "askhuman", "human", "confirm", "approv", "userinput")


@lru_cache(4096)
def tool_class(name: str) -> str:
    """The kind of a tool by its name: person, agent, shell, web, search, edit, read or other."""
    words = [word.lower() for word in re.findall(r"[A-Z]*[a-z]+|[A-Z]+", name)]
    if any(stem in "".join(words) for stem in _PERSON):
        return "person"
    for kind, stems in _CLASSES:
        if any(word.startswith(stems) for word in words):
            return kind
    return "other"


def args_class(arguments: object) -> str:
    """A coarse class of a call's arguments: the program a command line runs, without directory, variables, `sudo` or a
    leading `cd ... &&`; "" where there is no command.
    """
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return ""
    command = next(
        (arguments[k] for k in ("command", "cmd", "script") if isinstance(arguments.get(k), (str, list))), ""
    )
    if isinstance(command, list):
        command = " ".join(map(str, command[:8]))
    words = command[:512].replace("\n", " ; ").split()
    while words:
        word = words.pop(0)
        if word == "cd":
            cut = next((i for i, w in enumerate(words) if w in ("&&", ";") or w.endswith(";")), None)
            if cut is None:
                return "cd"
            del words[: cut + 1]
        elif (
            word not in ("sudo", "env", "time", "timeout", "nohup", ";", "&&")
            and "=" not in word
            and not word[0].isdigit()
        ):
            return re.sub(r"[^\w.+-]", "", word.rsplit("/", 1)[-1])[:MAX_NAME]
    return ""


def parse(text: str) -> tuple[ToolCall, ...]:
    """The tool calls at the end of a model's output, () if there are none. What stands inside <think> is not one."""
    if not isinstance(text, str):
        return ()
    text = text[-MAX_CHARS:].rpartition("</think>")[2]
    for find in (_hermes, _mistral, _llama, _bare_json):
        calls = find(text)
        if calls:
            return tuple(calls[:MAX_CALLS])
    return ()


def parse_tokens(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> tuple[ToolCall, ...]:
    """The same for token ids. decode: ids to text *with* special tokens, which mark the calls of Llama 3 and Mistral.
    A decoder that fails on them means no tool call.
    """
    try:
        text = decode(token_ids)
    except Exception:
        return ()
    return parse(text)


def _json(text: str) -> object:
    return next(_jsons(text), None)


def _jsons(text: str) -> Iterator[object]:
    """JSON values one after the other, separated by ";" as Llama 3 does."""
    decoder = json.JSONDecoder(strict=False)
    at = 0
    while True:
        at = _SEPARATOR.match(text, at).end()  # type: ignore[union-attr]
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        yield value


def _call(value: object) -> ToolCall | None:
    """One call from the JSON object of any of the formats: name with arguments, parameters or input, perhaps nested in
    "function".
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = next((value[k] for k in ("arguments", "parameters", "input") if k in value), None)
    if not isinstance(name, str) or arguments is None:
        return None
    return _named(name, arguments)


def _named(name: str, arguments: object) -> ToolCall | None:
    name = name.strip()
    if not re.fullmatch(r"[\w.:/-]+", name):
        return None
    return ToolCall(name[:MAX_NAME], args_class(arguments))


def _calls(value: object) -> list[ToolCall]:
    values = value if isinstance(value, list) else [value]
    return [call for call in map(_call, values) if call]


def _xml(text: str) -> list[ToolCall]:
    """<function=name> with JSON or <parameter=key> elements inside."""
    calls = []
    for part in text.split("<function=")[1:]:
        name, _, body = part.partition(">")
        body, end, _ = body.partition("</function>")
        pairs = (p.partition(">") for p in body.split("<parameter=")[1:])
        arguments = {key: value.partition("</parameter>")[0] for key, _, value in pairs}
        if end:
            calls.append(_named(name, arguments or _json(body)))
    return [call for call in calls if call]


def _hermes(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for part in text.split("<tool_call>")[1:]:
        calls += _xml(part) if part.lstrip().startswith("<function=") else _calls(_json(part))
    return calls


def _mistral(text: str) -> list[ToolCall]:
    parts = text.split("[TOOL_CALLS]")[1:]
    if len(parts) == 1 and parts[0].lstrip().startswith("["):
        return _calls(_json(parts[0]))
    calls = []
    for part in parts:
        name, brace, arguments = part.replace("[ARGS]", "", 1).partition("{")
        name = name.split("[CALL_ID]")[0]
        parsed = _json(brace + arguments)
        if isinstance(parsed, dict):
            calls.append(_named(name, parsed))
    return [call for call in calls if call]


def _llama(text: str) -> list[ToolCall]:
    _, tag, tail = text.rpartition("<|python_tag|>")
    if tag:
        return [call for value in _jsons(tail) for call in _calls(value)] or _builtin(tail)
    return _xml(text)


def _builtin(text: str) -> list[ToolCall]:
    """Llama 3's built-in tools: brave_search.call(query="...")."""
    match = re.match(r"\s*(\w{1,64})\.call\(", text)
    return [ToolCall(match[1])] if match else []


def _bare_json(text: str) -> list[ToolCall]:
    """The whole output is JSON: a call, a list of calls, or an OpenAI message with "tool_calls"."""
    if text.lstrip()[:1] not in ("{", "["):
        return []
    calls = []
    for value in _jsons(text):
        if isinstance(value, dict) and "tool_calls" in value:
            value = value["tool_calls"]
        calls += _calls(value)
    return calls
