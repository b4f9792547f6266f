from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path

import pytest

from retention.events import EVENTS, EventLog

GUARDRAIL_ON = {"lru_bias": 1.0}


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_events_are_one_json_object_a_line(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("guardrail_on", 1.5, lru_bias=0.9)
    log.emit("release", 2.0, lease=3, program='a\n"b"', tenant="", blocks=4, held_s=0.5, reason="released")
    log.close()
    first, second = read(log.path)
    assert first["event"] == "guardrail_on" and first["t"] == 1.5 and first["lru_bias"] == 0.9 and first["wall"] > 1e9
    assert second["program"] == 'a\n"b"' and second["lease"] == 3
    assert log.dropped == 0


def test_fields_must_be_those_of_the_schema(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(TypeError, match="lru_bias"):
        log.emit("guardrail_on", 0.0)
    with pytest.raises(KeyError):
        log.emit("surprise", 0.0)


def test_the_schema_is_documented():
    doc = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    for event, fields in EVENTS.items():
        row = re.search(rf"^\| `{event}` \|.*\|$", doc, re.M)
        assert row, event
        assert re.findall(r"`(\w+)`", row.group())[1:] == list(fields)


def test_a_path_where_no_file_can_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="events must be a file"):
        EventLog(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        EventLog(tmp_path / "missing" / "e.jsonl")
    with pytest.raises(ValueError, match="events must be the name of a file"):
        EventLog(tmp_path / ("x" * 300))
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ValueError, match="events must be writable"):
            EventLog(tmp_path / "locked" / "e.jsonl")


def test_files_rotate_and_the_oldest_go(tmp_path):
    log = EventLog(tmp_path / "e.jsonl", max_bytes=2000, keep=2)
    for i in range(100):
        log.emit("guardrail_on", float(i), lru_bias=1.0)
        while log._waiting:
            time.sleep(0.001)
    log.close()
    assert {p.name for p in tmp_path.iterdir()} <= {"e.jsonl", "e.jsonl.1", "e.jsonl.2"}
    newest = [e["t"] for name in ("e.jsonl.2", "e.jsonl.1") for e in read(tmp_path / name)]
    assert newest == sorted(newest) and max(newest) > 80
    assert all(p.stat().st_size < 3000 for p in tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_drops_events_and_blocks_nobody():
    log = EventLog("/dev/full", buffer=100, retry_s=0.01)
    for i in range(2000):
        log.emit("guardrail_on", float(i), **GUARDRAIL_ON)
    log.close()
    assert log.dropped == 2000
    assert not log._thread.is_alive()


def test_a_disk_that_hangs_blocks_nobody_and_the_buffer_is_bounded(tmp_path, monkeypatch):
    log = EventLog(tmp_path / "e.jsonl", buffer=50)
    hang, stuck = threading.Event(), threading.Event()
    write = log._write

    def hanging(batch):
        stuck.set()
        hang.wait(20)
        write(batch)

    monkeypatch.setattr(log, "_write", hanging)
    log.emit("guardrail_on", 0.0, **GUARDRAIL_ON)
    assert stuck.wait(10)
    for i in range(1000):
        log.emit("guardrail_on", float(i + 1), **GUARDRAIL_ON)
    assert len(log._waiting) == 50 and log.dropped == 950
    hang.set()
    log.close()
    assert [e["t"] for e in read(log.path)] == [float(i) for i in range(51)]


def test_a_disk_that_recovers_is_used_again(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    log = EventLog(tmp_path / "sub" / "e.jsonl", retry_s=0.01)
    (tmp_path / "sub").rmdir()
    log.emit("guardrail_on", 0.0, **GUARDRAIL_ON)
    while not log.dropped:
        time.sleep(0.001)
    (tmp_path / "sub").mkdir()
    log.emit("guardrail_on", 1.0, **GUARDRAIL_ON)
    log.close()
    assert [e["t"] for e in read(log.path)] == [1.0]


def test_closing_twice_and_emitting_after_is_harmless(tmp_path):
    log = EventLog(tmp_path / "e.jsonl")
    log.close()
    log.close()
    log.emit("guardrail_on", 0.0, **GUARDRAIL_ON)
    assert log.dropped == 1


@pytest.mark.parametrize("bad", [{"max_bytes": 0}, {"keep": 0}, {"buffer": 0}])
def test_bad_sizes_are_refused_by_name(bad, tmp_path):
    with pytest.raises(ValueError, match=next(iter(bad))):
        EventLog(tmp_path / "e", **bad)
