"""`kvq top`: what it makes of an event log and of an exporter."""

from __future__ import annotations

import json
import time
from io import StringIO

import pytest
from rich.console import Console

from bench import cli, top


def event(kind: str, program: str = "a", **fields) -> str:
    return json.dumps({"event": kind, "t": 0.0, "wall": time.time(), "program": program, "tenant": "", **fields}) + "\n"


def pin(lease: int, program: str = "a", tool: str = "bash", blocks: int = 9) -> str:
    return event("pin", program, lease=lease, tool=tool, blocks=blocks, ttl_s=50.0, hard=False)


def shown(view: top.View, limit: int = 40) -> str:
    out = StringIO()
    Console(file=out, width=100).print(top.render(view, limit))
    return out.getvalue()


def test_a_log_becomes_programs_and_totals(tmp_path):
    log = tmp_path / "events.jsonl"
    log.write_text(
        pin(1)
        + pin(2, "b", "person")
        + event("evict", "b", lease=2, blocks=4, left=5, reason="pressure")
        + pin(3, "c")
        + event("reuse", "c", lease=3, cached_tokens=100)
        + pin(4, "d")
        + event("expire", "d", lease=4, blocks=9)
        + "this is no event\n"
    )
    view = top.EventReader(log)()
    rows = {row["program"]: row for row in view.programs}
    assert {name: row["state"] for name, row in rows.items()} == {
        "a": "waiting_tool",
        "b": "waiting_person",
        "c": "running",
        "d": "idle",
    }
    assert rows["b"]["blocks"] == 5 and rows["c"]["lease_id"] is None
    assert 0 < rows["a"]["ttl_left_s"] <= 50
    assert view.totals["kvq_pins"] == 2 and view.totals["kvq_pinned_blocks"] == 14
    assert view.totals["kvq_pins_total"] == 4 and view.totals["kvq_evictions_total"] == 1
    text = shown(view)
    assert "2 leases, 14 blocks" in text and "waiting person" in text
    assert text.index("c ") < text.index("waiting tool") < text.index("idle")  # running first


def test_a_growing_log_is_followed_and_a_rotated_one_begins_anew(tmp_path):
    log = tmp_path / "events.jsonl"
    log.write_text(pin(1))
    read = top.EventReader(log)
    assert read().totals["kvq_pins_total"] == 1
    whole = event("expire", lease=1, blocks=9)
    with log.open("a") as file:
        file.write(whole[:20])
    assert read().totals["kvq_expired_total"] == 0  # half a line is not read
    with log.open("a") as file:
        file.write(whole[20:])
    assert read().totals["kvq_expired_total"] == 1
    log.rename(tmp_path / "events.jsonl.1")
    log.write_text(pin(2))
    view = read()
    assert view.totals["kvq_pins_total"] == 2 and view.programs[0]["lease_id"] == 2


def test_an_old_lease_does_not_end_a_new_one(tmp_path):
    log = tmp_path / "events.jsonl"
    log.write_text(pin(1) + pin(2) + event("release", lease=1, blocks=9, reason="superseded"))
    assert top.EventReader(log)().programs[0]["lease_id"] == 2


def test_totals_sum_over_labels():
    page = [
        'kvq_evictions_total{reason="a"} 2.0',
        'kvq_evictions_total{reason="b"} 1.0',
        "# HELP kvq_pins x",
        "vllm:x 3",
    ]
    assert dict(top.totals(page)) == {"kvq_evictions_total": 3.0}


def test_long_lists_are_cut_and_markup_is_text():
    row = {"tenant": "", "state": "idle", "tool": "", "blocks": 0, "lease_id": None, "hard": False, "ttl_left_s": 0.0}
    view = top.View([{**row, "program": f"[red]{i}", "turns": 1} for i in range(5)])
    text = shown(view, limit=3)
    assert "and 2 more" in text and "[red]0" in text


def test_a_name_cannot_steer_the_terminal():
    """Clients choose the names of programs and tools."""
    row = {"tenant": "", "state": "idle", "blocks": 0, "lease_id": None, "hard": False, "ttl_left_s": 0.0, "turns": 1}
    view = top.View([{**row, "program": "\x1b[2Ja\x9b31m\u202eé", "tool": "\x1b]0;b\x07"}])
    text = shown(view, limit=3)
    assert "[2Ja" in text and "31m" in text and "é" in text and "]0;b" in text
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(text)


def test_long_names_leave_room_for_the_rest():
    row = {"tenant": "", "state": "waiting_tool", "lease_id": 3, "hard": True, "ttl_left_s": 1234.5, "turns": 1000}
    long = {**row, "program": "é" * 256, "tool": "x y " * 16, "blocks": 4096}
    lines = shown(top.View([long, {**long, "program": "shown"}]), limit=3).splitlines()
    assert len(lines) == 5  # head, header, two rows, the note
    for line in lines[2:4]:
        assert "waiting tool" in line and "4096 hard" in line and "1234.5 s" in line and "1000" in line
    assert "shown" in lines[2]


@pytest.mark.parametrize("source", ["http://127.0.0.1:9", "missing.jsonl"])
def test_a_source_that_is_not_there_ends_with_one_line(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["top", "--once", source]) == 1
    error = capsys.readouterr().err
    assert source in error and error.count("\n") == 1
