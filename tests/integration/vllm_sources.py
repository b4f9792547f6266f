"""The Python sources of vLLM releases, for contract tests: out of the wheel on PyPI, without its 300 MB of binaries.

pip says where the wheel is; pip's own reader of remote wheels (of its feature `fast-deps`) fetches the parts of the
archive that hold .py files, about 9 MB. Kept in `~/.cache/kvq/wheels`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from bench.models import cache_dir

GAP = 1 << 18  # bytes between two files that are fetched all the same, to save a request


def vllm_sources(version: str) -> Path:
    """Folder with the package `vllm` of that release, its .py files only. Raises OSError where it cannot be had."""
    target = cache_dir() / "wheels" / f"vllm-{version}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        report = Path(work) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
        options = ["--ignore-installed", "--no-deps", "--ignore-requires-python", "--only-binary=:all:"]
        found = subprocess.run(
            [*pip, *options, "--report", str(report), f"vllm=={version}"], capture_output=True, text=True, timeout=300
        )
        if found.returncode:
            raise OSError(f"pip finds no vllm {version}: {(found.stderr.strip().splitlines() or ['no output'])[-1]}")
        url = json.loads(report.read_text())["install"][0]["download_info"]["url"]
        try:
            _extract(url, Path(work) / "unpacked")
        except Exception as error:  # whatever the network, or another pip, has to say
            raise OSError(f"{url} cannot be read in parts: {error}") from error
        try:
            (Path(work) / "unpacked").rename(target)
        except OSError:  # another process was quicker
            if not target.is_dir():
                raise
    return target


def _extract(url: str, target: Path) -> None:
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP
    from pip._internal.network.session import PipSession

    remote = LazyZipOverHTTP(url, PipSession(), chunk_size=1 << 16)
    with zipfile.ZipFile(remote) as wheel:  # type: ignore[type-var]
        wanted = sorted(
            (e for e in wheel.infolist() if e.filename.startswith("vllm/") and e.filename.endswith(".py")),
            key=lambda e: e.header_offset,
        )
        parts: list[list[int]] = []
        for entry in wanted:
            end = entry.header_offset + entry.compress_size + 512
            if parts and entry.header_offset - parts[-1][1] < GAP:
                parts[-1][1] = end
            else:
                parts.append([entry.header_offset, end])
        for start, end in parts:
            remote.seek(start)
            remote.read(end - start)
        wheel.extractall(target, wanted)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(vllm_sources(name))
