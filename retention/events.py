"""The event log: one JSON object a line. The fields are described in docs/events.md."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from pathlib import Path

# What each event carries besides event, t (the policy's clock) and wall (Unix time). docs/events.md explains them.
EVENTS = {
    "pin": ("lease", "program", "tenant", "tool", "tokens", "blocks", "ttl_s", "hard", "p_return", "price"),
    "reuse": (
        "lease",
        "program",
        "tenant",
        "tool",
        "tokens",
        "blocks",
        "cached_tokens",
        "waited_s",
        "ttl_s",
        "predicted_s",
    ),
    "miss": ("program", "tenant", "tool", "waited_s", "predicted_s", "cached_tokens"),
    "expire": ("lease", "program", "tenant", "tool", "blocks", "held_s", "reason"),
    "evict": ("lease", "program", "tenant", "tool", "blocks", "left", "reason", "held_s"),
    "pin_rejected_budget": ("program", "tenant", "tool", "blocks", "reason"),
    "release": ("lease", "program", "tenant", "blocks", "held_s", "reason"),
    "supersede": ("lease", "program", "tenant", "blocks", "held_s", "first_divergent_token"),
    "guardrail_off": ("retained_saved_s", "lru_saved_s", "queued_s", "retry_s"),
    "guardrail_on": ("lru_bias",),
    "fault": ("place", "error"),
}


def check_file(name: str, path: str | os.PathLike[str]) -> Path:
    """The path of a file that is to be written. Raises ValueError, with `name`, where that cannot be."""
    path = Path(path)
    try:
        if path.is_dir():
            raise ValueError(f"{name} must be a file, {path} is a folder")
        if not path.parent.is_dir():
            raise ValueError(f"{name} is {path}, but there is no folder {path.parent}: make it first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{name} must be writable, {path} is not")
    except OSError as error:
        raise ValueError(f"{name} must be the name of a file: {error}") from None
    return path


class EventLog:
    """Appends events to a file from a thread of its own, so that a slow or full disk never blocks the caller.

    path: the file; it is rotated to `path.1` ... `path.<keep>` when it grows past `max_bytes`. buffer: events that may
    wait for the disk; the newest are dropped beyond that, and `dropped` counts them, as it counts those that the disk
    refused. After an error the writer waits `retry_s`, doubling up to a minute, before it tries the disk again.

    `emit` may be called from any thread. Use `close()` to write what is left.
    Raises ValueError for a size below 1, and for a path where no file can be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 64 << 20,
        keep: int = 3,
        buffer: int = 10_000,
        retry_s: float = 1.0,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("keep", keep), ("buffer", buffer)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.path = check_file("events", path)
        self.dropped = 0
        self._max_bytes, self._keep, self._buffer, self._retry_s = max_bytes, keep, buffer, retry_s
        self._waiting: deque[dict[str, object]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def emit(self, event: str, t: float, **fields: object) -> None:
        """Queue one event; returns at once. An event with other fields than its schema's is a TypeError."""
        if set(fields) != set(EVENTS[event]):
            raise TypeError(f"event {event} takes {', '.join(EVENTS[event])}, got {', '.join(fields)}")
        with self._wake:
            if self._closed or len(self._waiting) >= self._buffer:
                self.dropped += 1
                return
            self._waiting.append({"event": event, "t": round(t, 6), "wall": round(time.time(), 3), **fields})
            if self._thread is None:  # started late: a fork before the first event must not lose it
                self._thread = threading.Thread(target=self._write_all, name="kvq-events", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, waiting for the disk at most `timeout_s`. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write_all(self) -> None:
        pause = self._retry_s
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                batch = list(self._waiting)
                self._waiting.clear()
                if not batch:
                    return
            try:
                self._write(batch)
                pause = self._retry_s
            except OSError:
                with self._wake:
                    self.dropped += len(batch)
                    if not self._closed:
                        self._wake.wait_for(lambda: self._closed, pause)
                pause = min(60.0, 2 * pause)

    def _write(self, batch: list[dict[str, object]]) -> None:
        lines = "".join(json.dumps(event, separators=(",", ":"), default=str) + "\n" for event in batch)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(lines)
            size = file.tell()
        if size >= self._max_bytes:
            for i in reversed(range(1, self._keep)):
                older = self.path.with_name(f"{self.path.name}.{i}")
                if older.exists():
                    older.replace(self.path.with_name(f"{self.path.name}.{i + 1}"))
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
