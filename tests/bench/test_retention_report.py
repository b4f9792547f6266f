"""The report of an event log against counts done by hand, and against a log that a policy wrote."""

from __future__ import annotations

import json
import math

import pytest

from bench.retention_report import main, read, render, summarize
from retention import EventLog, ProgramKey, ToolCall, TurnArrived, TurnFinished, make_policy

EVENTS = [
    {"event": "pin", "t": 0.0, "lease": 1, "program": "a", "tool": "bash", "blocks": 10, "ttl_s": 5.0},
    {"event": "pin", "t": 1.0, "lease": 2, "program": "b", "tool": "bash", "blocks": 20, "ttl_s": 5.0},
    {"event": "reuse", "t": 2.0, "lease": 1, "program": "a", "tool": "bash", "waited_s": 2.0, "predicted_s": 3.0},
    {"event": "evict", "t": 3.0, "lease": 2, "program": "b", "blocks": 5, "left": 15, "reason": "pressure"},
    {"event": "evict", "t": 4.0, "lease": 2, "program": "b", "blocks": 15, "left": 0, "reason": "pressure"},
    {"event": "miss", "t": 6.0, "program": "b", "tool": "bash", "waited_s": 5.0, "predicted_s": 3.0},
    {"event": "guardrail_off", "t": 7.0, "retry_s": 60.0},
    {"event": "pin", "t": 8.0, "lease": 3, "program": "a", "tool": "read", "blocks": 10, "ttl_s": 5.0},
    {"event": "miss", "t": 9.0, "program": "c", "tool": "read", "waited_s": None, "predicted_s": None},
]


def write(path, events):
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_counts_hit_rates_and_calibration_are_those_counted_by_hand():
    summary = summarize(EVENTS)
    assert summary.counts["pin"] == 3 and summary.counts["evict"] == 2
    assert summary.reasons["evict", "pressure"] == 2
    assert summary.tools["bash"].hit_rate == 0.5 and summary.tools["read"].hit_rate == 0.0
    assert summary.tools["bash"].waits == [2.0, 5.0]
    assert summary.tools["bash"].predicted == [(3.0, 2.0), (3.0, 5.0)]
    assert summary.tools["read"].waits == []


def test_a_lease_ends_with_its_last_block_and_a_live_one_has_no_end():
    leases = {lease.program + str(lease.start): lease for lease in summarize(EVENTS).leases}
    assert (leases["a0.0"].end, leases["a0.0"].how) == (2.0, "reuse")
    assert (leases["b1.0"].end, leases["b1.0"].how) == (4.0, "evict")
    assert math.isnan(leases["a8.0"].end)


def test_the_guardrail_is_off_until_it_is_on():
    off = summarize(EVENTS).off
    assert off[0][0] == 7.0 and math.isnan(off[0][1])
    assert summarize([*EVENTS, {"event": "guardrail_on", "t": 10.0}]).off == [(7.0, 10.0)]


def test_the_text_names_every_tool_and_rate():
    text = render(summarize(EVENTS, unreadable=2))
    assert "9 events in 9.0 s, 2 unreadable" in text
    assert "50.0%" in text and "read" in text and "pressure 2" in text


def test_cut_lines_are_skipped_and_counted_and_files_are_merged_by_time(tmp_path):
    late = write(tmp_path / "late.jsonl", EVENTS[5:])
    early = write(tmp_path / "early.jsonl", EVENTS[:5])
    with early.open("a") as file:
        file.write('{"event": "pin", "t"\n[]\n\n')
    events, bad = read([late, early])
    assert bad == 2 and [e["t"] for e in events] == sorted(e["t"] for e in EVENTS)


def test_the_command_draws_the_timeline(tmp_path, capsys):
    log = write(tmp_path / "events.jsonl", EVENTS)
    assert main([str(log)]) == 0
    assert (tmp_path / "events.png").read_bytes().startswith(b"\x89PNG")
    assert "TTL calibration" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "not json\n", '{"a": 1}\n'])
def test_a_log_without_events_is_refused_by_name(tmp_path, capsys, content):
    log = tmp_path / "none.jsonl"
    log.write_text(content)
    assert main([str(log), "--no-png"]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_a_missing_log_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "gone.jsonl")]) == 2
    assert "gone.jsonl" in capsys.readouterr().err


def test_what_a_policy_writes_can_be_read(tmp_path):
    now = [0.0]
    log = EventLog(tmp_path / "events.jsonl")
    policy = make_policy("fixed", ttl_s=10.0, total_blocks=100, clock=lambda: now[0], events=log)
    for turn in range(3):
        policy.turn_arrived(TurnArrived(f"r{turn}", ProgramKey("a"), 160))
        policy.turn_started(f"r{turn}", 0 if turn == 0 else 144)
        policy.turn_finished(TurnFinished(f"r{turn}", tokens=160, blocks=10, tool_calls=[ToolCall("bash")]))
        now[0] += 2.0
    log.close()
    summary = summarize(*read([tmp_path / "events.jsonl"]))
    assert summary.counts["pin"] == 3
    assert summary.tools["bash"].hits == 2 and summary.tools["bash"].waits == [2.0, 2.0]
    assert len(summary.leases) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"t": "2"},
        {"t": float("inf")},
        {"t": 10**400},
        {"ttl_s": None},
        {"lease": []},
        {"program": 7},
        {"blocks": "9"},
        {"reason": ["x"]},
    ],
)
def test_a_line_with_a_field_of_wrong_type_is_skipped_and_counted(tmp_path, wrong, capsys):
    log = write(tmp_path / "events.jsonl", [*EVENTS, {**EVENTS[0], **wrong}])
    assert main([str(log), "--no-png"]) == 0
    assert "9 events in 9.0 s, 1 unreadable" in capsys.readouterr().out


def test_what_a_log_says_cannot_steer_the_terminal_or_the_drawing(tmp_path, capsys):
    odd = {**EVENTS[0], "program": "$x^$", "tool": "\x1b[2J"}
    other = {"event": "\x1b[31mpin", "t": 1.0, "reason": "\x1b]0;title\x07"}
    log = write(tmp_path / "events.jsonl", [odd, other])
    assert main([str(log)]) == 0
    text = capsys.readouterr().out
    assert "[31mpin" in text and "]0;title" in text and not {"\x1b", "\x07"} & set(text)
