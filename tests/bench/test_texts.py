from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from bench import texts

TURN = re.compile(r"<turn \d>")


def encode(text: str) -> list[int]:
    """One token a character: windows are then slices of text."""
    return [ord(c) for c in text]


def decode(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


def write_session(path: Path, requests: list[tuple[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps({"input": i, "output": o}) for i, o in requests))


def test_turns_follow_the_longest_prompt_and_leave_branches_out(tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    write_session(path, [("ab", "1"), ("abXY", "branch"), ("abcd", "2"), ("abcd", "repeated"), ("abcdefg", "3")])
    assert texts.session_turns(path) == [texts.Turn("ab", "1"), texts.Turn("cd", "2"), texts.Turn("efg", "3")]


def test_agent_window_starts_after_the_shared_instructions_and_knows_its_turns(tmp_path: Path) -> None:
    prompts = list(itertools.accumulate(f"<turn {i}>" + "x" * 40 for i in range(12)))
    for name in "abcdefghij":
        write_session(
            tmp_path / "agent-traces" / "miniswe" / f"{name}.jsonl", [(p, f"answer {i}") for i, p in enumerate(prompts)]
        )
    window = texts.windows(encode, "evaluation", tmp_path, length=300)[0]
    text = decode(window.ids)
    assert "<turn 0>" not in text
    assert len(window.turn_starts) > 2
    for turn, start in enumerate(window.turn_starts, start=1):
        assert text[start:].startswith(f"<turn {turn}>"[: 300 - start])


def test_more_windows_continue_the_sessions(tmp_path: Path) -> None:
    prompts = list(itertools.accumulate(f"<turn {i}>" + "x" * 90 for i in range(12)))
    for name in "abcdefg":
        write_session(tmp_path / "agent-traces" / "miniswe" / f"{name}.jsonl", [(p, "") for p in prompts])
    first, second = texts.windows(encode, "evaluation", tmp_path, length=300, more=2)[:2]
    assert texts.windows(encode, "evaluation", tmp_path, length=300)[0] == first
    assert second.turn_starts[0] == 0  # it begins within a turn, which is then the window's first
    text = decode(second.ids)
    assert [text[s : s + 8] for s in second.turn_starts[1:]] == [m for m in TURN.findall(text) if text.index(m)]


def test_purposes_share_no_text(shared_data: Path) -> None:
    seen: dict[str, set[tuple[int, ...]]] = {}
    for purpose in texts.PURPOSES:
        windows = texts.windows(encode, purpose, shared_data, length=2048, more=3)
        assert {w.kind for w in windows} == {"wikitext", "agent"}
        assert all(len(w.ids) == 2048 for w in windows)
        # Runs of 200 characters: shorter ones do recur, a command's usual output for one.
        seen[purpose] = {w.ids[i : i + 200] for w in windows if w.kind == "wikitext" for i in range(0, 2048 - 200)}
    for a, b in itertools.combinations(texts.PURPOSES, 2):
        assert not seen[a] & seen[b]


def test_shipped_text_serves_without_data_and_keeps_its_last_window_for_evaluation(tmp_path: Path) -> None:
    missing = tmp_path / "absent"
    calibration = texts.windows(encode, "calibration", missing, length=1000)
    evaluation = texts.windows(encode, "evaluation", missing, length=1000)
    text = texts.SHIPPED.read_text()
    assert [decode(w.ids) for w in evaluation] == [text[-1000:]]
    assert decode(calibration[-1].ids) == text[-2000:-1000]
    with pytest.raises(ValueError, match="no text for other"):
        texts.windows(encode, "other", missing)


def test_unknown_purpose_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="purpose is 'training'; allowed: calibration, evaluation, other"):
        texts.windows(encode, "training", tmp_path)


def test_wikitext_spacing_is_undone() -> None:
    tokenised = 'The " old mill " ( built in 1850 ) cost 1 @,@ 200 @.@ 50 , which was n\'t well @-@ spent .'
    assert texts.detokenize(tokenised) == 'The "old mill" (built in 1850) cost 1,200.50, which wasn\'t well-spent.'
