"""`vllm serve` with KVQ_RETENTION=1, started for real and driven with the openai client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

from bench.models import model_path  # noqa: E402
from bench.top import totals  # noqa: E402
from integration import frontend  # noqa: E402

BLOCK, BLOCKS = 32, 48  # 1536 tokens of KV
TOOL_CALL = '<tool_call>\n{"name": "run_tests", "arguments": {"command": "pytest -q"}}\n</tool_call>'


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def until(check: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What `check` returns, once that is true. It may fail until then."""
    end = time.monotonic() + seconds
    while True:
        try:
            found = check()
        except OSError:
            found = None
        if found or time.monotonic() > end:
            assert found, f"did not come true in {seconds:g} s"
            return found
        time.sleep(0.2)


class Server:
    def __init__(self, port: int, exporter: int) -> None:
        self.url, self.exporter = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{exporter}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0)

    def chat(self, messages: list[dict[str, str]], program: str | None = None, **options: Any) -> Any:
        extra = options.pop("extra_body", {})
        if program is not None:
            extra = {**extra, "vllm_xargs": {"kvq_program_id": program, **extra.get("vllm_xargs", {})}}
        options = {"max_tokens": 4, "temperature": 0, **options}
        return self.client.chat.completions.create(model="model", messages=messages, extra_body=extra, **options)

    def metrics(self) -> Counter[str]:
        return totals(get(f"{self.url}/metrics").splitlines())

    def programs(self) -> dict[str, dict[str, Any]]:
        return {row["program"]: row for row in json.loads(get(f"{self.exporter}/programs"))["programs"]}

    def leased(self, program: str) -> dict[str, Any] | None:
        row = self.programs().get(program)
        return row if row is not None and row["lease_id"] is not None else None

    def running(self) -> float:
        for line in get(f"{self.url}/metrics").splitlines():
            if line.startswith("vllm:num_requests_running"):
                return float(line.rpartition(" ")[2])
        raise AssertionError("vLLM does not say how many requests run")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    server = Server(free_port(), free_port())
    environment = {
        **os.environ,
        "KVQ_RETENTION": "1",
        "KVQ_CONFIG": json.dumps({"events": str(folder / "events.jsonl")}),
        "KVQ_METRICS_PORT": server.exporter.rpartition(":")[2],
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [sys.executable, str(Path(__file__).with_name("vllm_cli.py")), "serve", str(model_path("smollm2-135m"))]
    for name, value in {
        "port": server.url.rpartition(":")[2],
        "served-model-name": "model",
        "dtype": "float32",
        "max-model-len": 1024,
        "block-size": BLOCK,
        "num-gpu-blocks-override": BLOCKS + 1,
        "max-num-seqs": 4,
        "tool-call-parser": "hermes",
    }.items():
        command += [f"--{name}", str(value)]
    command += ["--enforce-eager", "--enable-prompt-tokens-details", "--enable-auto-tool-choice"]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:

        def up() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            return get(f"{server.url}/health") == ""

        until(up, 240)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def conversation(name: str) -> list[dict[str, str]]:
    entries = " ".join(f"Entry {i} of {name}: service {i % 7} was slow." for i in range(24))
    return [{"role": "system", "content": f"{name} keeps the log. {entries}"}, {"role": "user", "content": "Check it."}]


def flood(server: Server, tag: str) -> None:
    """More prompt tokens than the pool holds."""
    for i in range(7):
        server.chat(conversation(f"{tag}-{i}"), max_tokens=1)


def test_a_paused_program_survives_a_flood_and_others_do_not(server):
    kept, plain = conversation("kept"), conversation("plain")
    # How long a lease is worth it depends on how fast this machine is; that is not what is tested here.
    forced = {"structured_outputs": {"choice": [TOOL_CALL]}, "vllm_xargs": {"kvq_ttl_s": 600}}
    answer = server.chat(kept, "kept", max_tokens=80, extra_body=forced)
    assert answer.choices[0].message.content == TOOL_CALL
    receipt = frontend.receipt(answer)
    assert receipt["program"] == "kept" and receipt["retained"] and receipt["reason"] == "kept"
    assert receipt["blocks"] == (answer.usage.total_tokens - 1) // BLOCK and receipt["ttl_s"] > 0
    assert frontend.receipt(server.chat(plain)) is None
    # The core saw token ids only; the front end told it which tool was called.
    assert until(lambda: server.leased("kept"))["tool"] == "run_tests"
    flood(server, "flood")
    back = [{"role": "assistant", "content": TOOL_CALL}, {"role": "tool", "content": "3 passed"}]
    answer = server.chat([*kept, *back], "kept")
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached == frontend.receipt(answer)["reused_tokens"]
    assert cached // BLOCK >= receipt["blocks"] - 2  # the template opens the next turn inside a block
    answer = server.chat([*plain, {"role": "assistant", "content": "."}, {"role": "user", "content": "Again."}])
    assert not answer.usage.prompt_tokens_details.cached_tokens


def test_metrics_are_on_the_servers_own_page_and_on_the_exporters(server):
    server.chat(conversation("metrics"), "metrics")
    until(lambda: server.leased("metrics"))
    until(lambda: server.metrics()["kvq_pins"] >= 1)
    page = get(f"{server.url}/metrics")
    for line in (
        "# TYPE kvq_pins gauge",
        "# TYPE kvq_pinned_blocks gauge",
        "# TYPE kvq_reuse_total counter",
        "# TYPE kvq_evictions_total counter",
        "# TYPE kvq_ttl_error_seconds summary",
        "kvq_guardrail_off 0.0",
    ):
        assert line in page
    assert "# TYPE kvq_pins gauge" in get(f"{server.exporter}/metrics")


def test_a_streamed_turn_is_retained_too(server):
    chunks = list(
        server.chat(
            conversation("streamed"),
            "streamed",
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"vllm_xargs": {"kvq_tool_name": "Bash", "kvq_ttl_s": 77}},
        )
    )
    assert chunks[-1].usage.completion_tokens > 0
    row = until(lambda: server.leased("streamed"))
    assert row["tool"] == "Bash" and 60 < row["ttl_left_s"] <= 77


def test_a_turn_ended_by_a_stop_string_counts_as_ended_not_as_aborted(server):
    forced = {"structured_outputs": {"choice": [TOOL_CALL + " and then more words"]}}
    answer = server.chat(conversation("stopped"), "stopped", max_tokens=80, stop=["</tool_call>"], extra_body=forced)
    assert answer.choices[0].finish_reason == "stop"
    assert until(lambda: server.leased("stopped"))["tool"] == "run_tests"


def test_release_lets_go(server):
    server.chat(conversation("over"), "over")
    until(lambda: server.leased("over"))
    answer = server.chat(conversation("over"), "over", extra_body={"vllm_xargs": {"kvq_release": True}})
    assert not frontend.receipt(answer)["retained"]
    until(lambda: server.leased("over") is None)


def test_a_client_that_goes_away_leaves_nothing_behind(server):
    stream = server.chat(conversation("gone"), "gone", max_tokens=600, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    until(lambda: server.running() == 0)
    assert server.leased("gone") is None


def test_a_client_killed_in_the_middle_leaves_nothing_behind(server):
    program = f"""
import openai
client = openai.OpenAI(base_url={server.url + "/v1"!r}, api_key="none")
stream = client.chat.completions.create(model="model", messages={conversation("killed")!r}, max_tokens=600, stream=True,
    extra_body={{"ignore_eos": True, "vllm_xargs": {{"kvq_program_id": "killed"}}}})
for chunk in stream:
    print("chunk", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None and client.stdout.readline()
        client.send_signal(signal.SIGKILL)
    until(lambda: server.running() == 0)
    assert server.leased("killed") is None
    assert server.chat(conversation("after"), "after").choices[0].message.content


@pytest.mark.parametrize(
    "wrong",
    [
        {"kvq_ttl_s": "soon", "kvq_priority": 1000, "kvq_tool_pending": "perhaps"},
        {"kvq_ttl_s": -1, "kvq_priority": -(2**62), "kvq_release": 7, "kvq_tool_name": "x" * 10_000},
        {"kvq_ttl_s": ["1"], "kvq_tool_name": [], "kvq_unknown": "?", "kvq_tenant": "", "kvq_turn_starts": [-1, -2]},
    ],
)
def test_wrong_hints_do_not_fail_a_request(server, wrong):
    answer = server.chat(conversation("wrong"), "wrong", extra_body={"vllm_xargs": wrong})
    assert frontend.receipt(answer)["program"] == "wrong"


def test_a_name_is_text_whatever_is_in_it(server):
    names = {"\x1b[2J\x00\n\u202e[red]{}%s\u2028" * 4: True, "é" * 256: True, "x" * 257: False, "y" * 100_000: False}
    for name, good in names.items():
        receipt = frontend.receipt(server.chat(conversation("names"), name))
        assert receipt["program"] == name if good else receipt is None
    kept = {name for name, good in names.items() if good}
    until(lambda: names.keys() & server.programs().keys() == kept)


def test_pins_of_the_whole_pool_with_absurd_hints_stop_nobody(server):
    greedy = {"kvq_ttl_s": 1e300, "kvq_priority": 100, "kvq_tool_pending": 1}
    for i in range(6):
        server.chat(conversation(f"idle{i}"), f"idle{i}", extra_body={"vllm_xargs": greedy})
    until(lambda: sum(row["blocks"] for row in server.programs().values()) > BLOCKS - 12)
    before = server.metrics()["kvq_evictions_total"]
    long = [*conversation("long"), *conversation("longer"), {"role": "user", "content": "Sum it up."}]
    answer = server.chat(long, max_tokens=60, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 60 and answer.usage.prompt_tokens > 16 * BLOCK
    until(lambda: server.metrics()["kvq_evictions_total"] > before)
    for i in range(6):
        bye = [{"role": "user", "content": "Bye."}]
        server.chat(bye, f"idle{i}", max_tokens=1, extra_body={"vllm_xargs": {"kvq_release": True}})
    until(lambda: not any(row["blocks"] for name, row in server.programs().items() if name.startswith("idle")))


def test_top_shows_the_programs_of_a_running_server(server):
    server.chat(conversation("shown"), "shown")
    until(lambda: server.leased("shown"))
    command = [sys.executable, "-m", "bench", "top", "--once", server.exporter]
    frame = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "shown" in frame and "waiting" in frame
