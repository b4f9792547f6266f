"""Texts to calibrate on and to measure accuracy with: WikiText-2, recorded agent sessions, and a small text of our own.

Windows of one purpose never share text with those of another: encyclopedia windows lie apart, and an agent
session belongs to one purpose only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT_DATA = Path("../shared/data")
SHIPPED = Path(__file__).parent / "data" / "text.txt"
PURPOSES = ("calibration", "evaluation", "other")
WIKITEXT_WINDOWS = {"calibration": 4, "evaluation": 6, "other": 4}
AGENT_WINDOWS = {"calibration": 3, "evaluation": 4, "other": 3}
# Of each kind of text in pooled figures, however many windows of it there are: the smallest evaluation set's own.
WEIGHTS = {"wikitext": 6.0, "agent": 4.0, "shipped": 1.0}

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Window:
    """Consecutive token ids of one text.

    ``kind``: "wikitext", "agent" or "shipped". ``turn_starts``: indices in ``ids`` where a turn of an agent session
    begins (one turn: what the tools and the user said, and the model's answer); empty for other kinds.
    """

    kind: str
    ids: tuple[int, ...]
    turn_starts: tuple[int, ...] = ()


def windows(encode: Encode, purpose: str, data: Path = DEFAULT_DATA, length: int = 1024, more: int = 1) -> list[Window]:
    """Windows of ``length`` tokens for ``purpose`` ("calibration", "evaluation" or "other").

    ``encode`` turns text to token ids, without special tokens. ``more``: times as many windows of the encyclopedia, and
    up to as many of each agent session. Where ``data`` does not exist, the shipped text gives windows for calibration
    and evaluation. Raises ValueError for another purpose, or where no window is found.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose is {purpose!r}; allowed: {', '.join(PURPOSES)}")
    if not data.is_dir():
        found = list(shipped(encode, purpose, length))
    else:
        found = [*wikitext(encode, purpose, data, length, more), *agent(encode, purpose, data, length, more)]
    if not found:
        raise ValueError(f"no text for {purpose} with {length} tokens a window under {data}")
    return found


def shipped(encode: Encode, purpose: str, length: int) -> Iterator[Window]:
    """Cut the shipped text: its last window is for evaluation, the windows before it for calibration."""
    ids = encode(SHIPPED.read_text())
    starts = list(range(len(ids) % length, len(ids) - length + 1, length))
    for start in {"evaluation": starts[-1:], "calibration": starts[:-1]}.get(purpose, []):
        yield Window("shipped", tuple(ids[start : start + length]))


def detokenize(text: str) -> str:
    """Undo the spacing of tokenised WikiText (the file at hand is not the raw version)."""
    for mark in ("-", ",", "."):
        text = text.replace(f" @{mark}@ ", mark)
    text = re.sub(r" ([.,;:!?%)\]])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    text = text.replace(" 's", "'s").replace(" n't", "n't").replace(" <unk>", " unk")
    return re.sub(r'" ([^"\n]*?) "', r'"\1"', text)


def wikitext(encode: Encode, purpose: str, data: Path, length: int, more: int) -> Iterator[Window]:
    """Windows spread evenly over the corpus, the three purposes one after another."""
    path = data / "wikitext2" / "valid.txt"
    if not path.is_file():
        return
    text = detokenize(path.read_text())
    total = more * sum(WIKITEXT_WINDOWS.values())
    first = more * sum(n for p, n in WIKITEXT_WINDOWS.items() if PURPOSES.index(p) < PURPOSES.index(purpose))
    for slot in range(first, first + more * WIKITEXT_WINDOWS[purpose]):
        # Cut the text before encoding it, at a line: a slice of the whole corpus holds far more tokens than a window.
        start = text.index("\n", slot * (len(text) // total))
        ids = encode(text[start : start + len(text) // total])
        if len(ids) >= length:
            yield Window("wikitext", tuple(ids[:length]))


@dataclass(frozen=True)
class Turn:
    """One request of a session: text that is new in its prompt, and the model's answer."""

    prompt: str
    answer: str


def session_turns(path: Path) -> list[Turn]:
    """Turns along the longest prompt of a recorded session (one JSON line a request, possibly of several branches).

    A prompt that begins with an earlier one continues it; what it adds is the next turn's prompt.
    """
    requests = [json.loads(line) for line in path.read_text().splitlines()]
    longest = max((r["input"] for r in requests), key=len)
    answers: dict[int, str] = {}
    for request in requests:
        if longest.startswith(request["input"]):
            answers.setdefault(len(request["input"]), request["output"])
    ends = sorted(answers)
    return [Turn(longest[start:end], answers[end]) for start, end in zip([0, *ends], ends, strict=False) if end > start]


def agent(encode: Encode, purpose: str, data: Path, length: int, more: int) -> Iterator[Window]:
    """Windows of a session from its second turn on: the first holds instructions that all sessions share."""
    taken = 0
    skip = sum(n for p, n in AGENT_WINDOWS.items() if PURPOSES.index(p) < PURPOSES.index(purpose))
    traces = data / "agent-traces"
    for path in [*sorted(traces.glob("miniswe/*.jsonl")), *sorted(traces.glob("taubench/*.jsonl"))]:
        ids: list[int] = []
        starts = []
        for turn in session_turns(path)[1:]:
            starts.append(len(ids))
            ids += encode(f"{turn.prompt.strip()}\n\n{turn.answer.strip()}\n\n")
        if len(ids) < length:
            continue
        if skip <= taken < skip + AGENT_WINDOWS[purpose]:
            for begin in range(0, min(len(ids) // length, more) * length, length):
                inside = (s - begin for s in starts if begin < s < begin + length)
                yield Window("agent", tuple(ids[begin : begin + length]), (0, *inside))
        taken += 1
