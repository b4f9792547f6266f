"""`kvq top`: what it makes of an event log and of an exporter."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
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
    assert cli.main(["top", "--once", source]) == 2
    error = capsys.readouterr().err
    assert source in error and error.count("\n") == 1


ROW = {"program": "a", "tenant": "", "state": "running", "tool": "", "blocks": 0, "ttl_left_s": 0.0, "turns": 1}


@pytest.fixture
def exporter():
    """Address of a server, and the answers by path that it gives. Without one it speaks no HTTP."""
    answers: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path in answers:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answers[self.path].encode())
            else:
                self.wfile.write(b"SSH-2.0-\x1b[2J\r\n")

        def log_message(self, *args) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", answers
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (None, "SSH-2.0"),
        ("[]", "not an object"),
        ("{}", "age_s"),
        ('{"age_s": null, "programs": []}', "age_s"),
        ('{"age_s": 1, "programs": {}}', "programs"),
        (json.dumps({"age_s": 1, "programs": [{**ROW, "state": None}]}), "state"),
        (json.dumps({"age_s": 1, "programs": [{**ROW, "state": "asleep"}]}), "'asleep'"),
        (json.dumps({"age_s": 1, "programs": [{**ROW, "blocks": "7"}]}), "blocks is '7'"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_server_that_is_no_exporter_is_named_in_one_line(exporter, capsys, answer, named):
    url, answers = exporter
    if answer is not None:
        answers["/programs"] = answer
    assert cli.main(["top", "--once", url]) == 2
    error = capsys.readouterr().err
    assert url in error and named in error and error.count("\n") == 1 and "\x1b" not in error


def test_engines_are_told_apart_where_there_are_several(exporter, capsys):
    url, answers = exporter
    answers["/metrics"] = "kvq_pins 2.0\n"
    for rows, shown in (([ROW], False), ([{**ROW, "engine": 0}, {**ROW, "engine": 1}], True)):
        answers["/programs"] = json.dumps({"age_s": 0.2, "programs": rows})
        assert cli.main(["top", "--once", url]) == 0
        out = capsys.readouterr().out
        assert ("engine" in out) == shown and "2 leases" in out


@pytest.mark.parametrize(
    "argv",
    [["--interval", "1e308"], ["--interval", "nan"], ["--interval", "0"], ["--rows", "-3"], ["--rows", "x"]],
)
def test_arguments_out_of_range_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["top", *argv])
    assert stop.value.code == 2
    assert f"argument {argv[0]}: {argv[1]!r} is not allowed; give " in capsys.readouterr().err


def test_an_address_that_is_none_is_refused(capsys):
    assert cli.main(["top", "http://h:1x"]) == 2
    assert "http://h:1x" in capsys.readouterr().err


def test_without_a_terminal_one_frame_is_printed(tmp_path, capsys):
    log = tmp_path / "events.jsonl"
    log.write_text(pin(1))
    assert cli.main(["top", str(log)]) == 0
    printed = capsys.readouterr()
    assert "1 leases, 9 blocks" in printed.out and "no terminal" in printed.err


@pytest.mark.parametrize(
    "fields", [{"program": 7}, {"ttl_s": None}, {"ttl_s": float("nan")}, {"blocks": 1.5}, {"t": "2"}, {"lease": True}]
)
def test_a_line_with_a_field_of_wrong_type_counts_for_nothing(tmp_path, fields):
    log = tmp_path / "events.jsonl"
    log.write_text(json.dumps({**json.loads(pin(1)), **fields}) + "\n" + pin(2, "b"))
    view = top.EventReader(log)()
    assert view.totals["kvq_pins_total"] == 1 and [row["program"] for row in view.programs] == ["b"]
