"""kvq's numbers for Prometheus and for `kvq top`.

In a server they are on vLLM's own /metrics. Elsewhere, and where several API servers share an engine, `serve` opens a
port of its own. Both show what was last asked of the engine core, at most `REFRESH_S` old while the engine works.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from retention.metrics import METRICS

log = logging.getLogger(__name__)

REFRESH_S = 1.0
DEFAULT_PORT = 9400
_SUM, _COUNT = "_sum", "_count"
_METRICS = {
    "kvq_enabled": ("gauge", "", "1 while retention is on"),
    "kvq_faults_total": ("counter", "", "faults in kvq's hooks; after one, retention is off and the engine goes on"),
    **METRICS,
}


class Snapshot:
    """The last answers of one engine's core to "metrics" and "programs", refreshed on the thread that runs the engine.

    programs: whether to ask for them too. A core that does not answer leaves the old numbers, which `age_s` dates.
    """

    def __init__(self, connection: Any, programs: bool) -> None:
        self.metrics: Mapping[str, Any] = {}
        self.programs: list[dict[str, Any]] = []
        self._connection = connection
        self._with_programs = programs
        self._at = time.monotonic()
        self._next = 0.0
        self._poll: asyncio.Task[None] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the numbers were read."""
        return time.monotonic() - self._at

    def refresh(self) -> None:
        """Ask a synchronous engine, unless it was asked less than `REFRESH_S` ago."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + REFRESH_S
        try:
            metrics = self._connection.call("metrics")
            programs = self._connection.call("programs")["programs"] if self._with_programs else []
        except Exception as error:
            self._next = now + 60.0
            log.warning("kvq: no metrics from the engine: %s", error)
            return
        self._take(metrics, programs)

    def poll(self) -> None:
        """Keep asking an asynchronous engine, from the running event loop. Does nothing without one."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._poll is None or self._poll.done():
            self._poll = loop.create_task(self._poll_forever())

    def close(self) -> None:
        if self._poll is not None and not self._poll.get_loop().is_closed():
            self._poll.get_loop().call_soon_threadsafe(self._poll.cancel)

    async def _poll_forever(self) -> None:
        pause = REFRESH_S
        while pause < 60.0:  # then the engine is gone; the next scrape tries again
            try:
                metrics = await self._connection.acall("metrics")
                programs = (await self._connection.acall("programs"))["programs"] if self._with_programs else []
                self._take(metrics, programs)
                pause = REFRESH_S
            except Exception as error:
                pause *= 4
                log.debug("kvq: no metrics from the engine: %s", error)
            await asyncio.sleep(pause)

    def _take(self, metrics: Mapping[str, Any], programs: list[dict[str, Any]]) -> None:
        self.metrics, self.programs, self._at = metrics, programs, time.monotonic()


class Collector:
    """Turns a snapshot into Prometheus metric families; `prometheus_client` calls `collect` at every scrape."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        self._snapshot.poll()
        metrics = self._snapshot.metrics
        if not metrics:
            return
        for name, (kind, label, text) in _METRICS.items():
            value = metrics.get(name, {} if label else 0.0)
            if name.endswith(_COUNT):
                continue
            if name.endswith(_SUM):
                name = name.removesuffix(_SUM)
                yield SummaryMetricFamily(name, text, count_value=metrics.get(name + _COUNT, 0.0), sum_value=value)
                continue
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
                name, text, labels=[label] if label else None
            )
            if label:
                for pair, number in value.items():
                    family.add_metric([pair.partition("=")[2]], number)
            else:
                family.add_metric([], value)
            yield family


class Exporter:
    """An HTTP server of its own: `/metrics` for Prometheus, `/programs` (JSON) for `kvq top`.

    Raises OSError where the address cannot be had. `port` is the one it got, if 0 was asked for.
    """

    def __init__(self, snapshot: Snapshot, host: str, port: int) -> None:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(Collector(snapshot))  # type: ignore[arg-type]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    body, kind = generate_latest(registry), CONTENT_TYPE_LATEST
                elif self.path == "/programs":
                    answer = {"age_s": snapshot.age_s, "programs": snapshot.programs}
                    body, kind = json.dumps(answer).encode(), "application/json"
                else:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Not into the engine's log."""

        self.snapshot = snapshot
        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.host, self.port = host, self._server.server_address[1]
        self._undo: Callable[[], object] = lambda: None
        threading.Thread(target=self._server.serve_forever, name="kvq-exporter", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def close(self) -> None:
        """Stop serving and stop asking the engine."""
        self._undo()
        self.snapshot.close()
        self._server.shutdown()
        self._server.server_close()


def serve(engine: Any, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> Exporter:
    """Serve the numbers of `engine` (`LLM`, `LLMEngine` or `AsyncLLM`) at a port of its own, until `close()`.

    An engine that is stepped by the caller is asked while it steps, so the numbers of an idle one stand still.
    Raises IntegrationError for an engine without kvq, OSError for a port that is taken.
    """
    from integration.client import connect

    engine = getattr(engine, "llm_engine", engine)
    exporter = Exporter(Snapshot(connect(engine), programs=True), host, port)
    if hasattr(engine, "step"):
        step = engine.step

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            exporter.snapshot.refresh()
            return step(*args, **kwargs)

        exporter.snapshot.refresh()
        engine.step = stepped
        exporter._undo = lambda: vars(engine).pop("step", None)
    else:
        exporter.snapshot.poll()
    return exporter


def publish(engine: Any) -> None:
    """Put the numbers of a server's engine on its /metrics, and at `KVQ_METRICS_PORT` where that is set."""
    from prometheus_client import REGISTRY

    from integration.client import connect

    if not hasattr(engine, "step") and not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        snapshot = Snapshot(connect(engine), programs=False)
        REGISTRY.register(Collector(snapshot))  # type: ignore[arg-type]
        snapshot.poll()
    port = os.environ.get("KVQ_METRICS_PORT")
    if port:
        try:
            engine._kvq_exporter = serve(engine, int(port))
        except (OSError, ValueError) as error:  # no port, or another API server of this host has it
            log.warning("kvq: KVQ_METRICS_PORT=%s: %s", port, error)
    elif os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        log.warning("kvq: several API servers share /metrics, which shows no kvq metrics then; set KVQ_METRICS_PORT")
