"""Every configuration that ``kvq.tune --quick`` may choose, and a few more, against kvq.reference on the GPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from kvq import INT4, INT4_SYM, INT8, K8V4, DecodeConfig, reference, tune
from kvq.kernels import quantize
from kvq.kernels.timing import in_processes
from kvq.ops import new_status
from kvq.page import PageLayout
from kvq.scheme import QuantScheme
from kvq.tuned import VALUES, ShapeClass, WriteClass, WriteConfig
from tests import tolerances
from tests.kernels import cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BASE = cases.Case("", head_dim=128, page_size=64, kv_heads=2, lens=(700, 0, 61), dtype=torch.bfloat16)
WRITTEN = [
    replace(BASE, name="int4"),
    replace(BASE, name="int4-hot", hot=True),
    replace(BASE, name="int4-sym", scheme=INT4_SYM),
    replace(BASE, name="int8", scheme=INT8),
    replace(BASE, name="k8v4-hot", scheme=K8V4, hot=True),
    replace(BASE, name="int4-offset", mu=3.0, pairs=16, pair_scale=True),
    replace(BASE, name="int4-d80", head_dim=80),
]
WIDE = replace(BASE, name="wide", group=16, lens=(5000, 0, 131))
NARROW = replace(BASE, name="narrow", group=4, hot=True, lens=(5000, 0, 131))


def gpu() -> tune.Gpu:
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    return tune.Gpu(properties.name, capability, 227 << 10, 228 << 10, properties.multi_processor_count, 0)


def write_configs(case: cases.Case) -> list[WriteConfig]:
    """Everything for INT4 and INT8; for others every time to read values, two with an offset, which compiles slowly."""
    if case.name in ("int4", "int8"):
        return tune.write_candidates(WriteClass(case.name, False, "large", case.head_dim), gpu(), True)
    times = ("late", "apart") if case.pairs else VALUES
    return [WriteConfig(64, 4, values) for values in times]


def decode_configs(case: cases.Case) -> list[DecodeConfig]:
    wide = case is WIDE
    shape = ShapeClass("int4", False, "large" if wide else "small", 16 if wide else 8, 128, 64)
    more = [DecodeConfig(num_stages=5, maxnreg=200)] if wide else []
    return [replace(c, programs=0.1, min_chunk=1) for c in [*tune.compiled_candidates(shape, True), *more]]


def compile_write(name: str, config: WriteConfig) -> None:
    cases.write_kernel(cases.make_batch(next(c for c in WRITTEN if c.name == name), "cuda"), config)


def compile_decode(name: str, config: DecodeConfig) -> None:
    case = WIDE if name == "wide" else NARROW
    batch = cases.make_batch(case, "cuda")
    cases.write_reference(batch)
    cases.decode_kernel(batch, torch.float32, config)


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile side by side what the tests of this module need."""
    jobs = [(compile_write, (case.name, config)) for case in WRITTEN for config in write_configs(case)]
    decodes = [(compile_decode, (case.name, config)) for case in (WIDE, NARROW) for config in decode_configs(case)]
    in_processes([*decodes, *jobs], max(1, (os.cpu_count() or 1) - 1))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", WRITTEN, ids=str)
def test_every_way_of_writing_stores_what_the_reference_stores(case: cases.Case) -> None:
    want = cases.make_batch(case, "cuda")
    cases.write_reference(want)
    first = None
    for config in write_configs(case):
        batch = cases.make_batch(case, "cuda")
        before = batch.pages.clone()
        assert cases.write_kernel(batch, config).tolist() == [0, 0, 0, 0], config
        assert (batch.pages != want.pages).float().mean() < tolerances.WRITE_BYTES, config
        untouched = (want.pages == before).all(1)
        assert untouched.any() and torch.equal(batch.pages[untouched], want.pages[untouched]), config
        if batch.hot is not None and want.hot is not None:
            assert torch.equal(batch.hot.pool.view(torch.int16), want.hot.pool.view(torch.int16)), config
        for i, n in enumerate(case.lens):
            if n:
                got, ideal = (
                    reference.gather(x.pages, x.layout, x.block_tables[i], n, x.transform, x.hot) for x in (batch, want)
                )
                assert all(cases.relative_error(a, b) < 0.01 for a, b in zip(got, ideal)), config
        first = batch.pages if first is None else first
        assert (batch.pages != first).float().mean() < tolerances.WRITE_BYTES, config


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("scheme", [INT4, INT4_SYM, INT8, K8V4], ids=lambda s: s.name)
def test_bad_rows_are_counted_and_left_out(scheme: QuantScheme, values: str) -> None:
    """NaN, inf, rows beyond fp16 and slots that do not exist, in a chunk of 64 tokens a program."""
    layout = PageLayout(scheme, 64, 2, 128)
    g = torch.Generator("cuda").manual_seed(0)
    key, value = (torch.randn(200, 2, 128, generator=g, device="cuda").to(torch.bfloat16) for _ in range(2))
    key[1, 0, 0], key[66, 1, 127], value[3, 0, 65] = torch.nan, torch.inf, -torch.inf
    value[4, 1, 5], key[4, 1, 7], value[70, 0, 3] = torch.nan, torch.nan, 1e6
    slots = torch.arange(200, device="cuda")
    slots[6], slots[7], slots[8] = 256, -1, 2**40
    pages = torch.zeros(4, layout.page_bytes, dtype=torch.uint8, device="cuda")
    status = new_status("cuda")
    config = WriteConfig(*((64, 4) if scheme.value.rotate else (16, 2)), values)
    quantize.write(pages, layout, key, value, slots, status, config=config)
    assert status.tolist() == [2, 5, 1, 0]
    k, v = reference.gather(pages, layout, torch.arange(4, device="cuda"), 200)
    for got, x in ((k, key), (v, value)):
        assert torch.isfinite(got).all() and not got[6:9].any()
        whole = torch.isfinite(x).all(-1)
        whole[6:9] = False
        assert not got[~whole].any() and got[whole].any(-1).all()
        ordinary = whole & (x.abs() < 100).all(-1)
        assert cases.relative_error(got[ordinary], x[ordinary]) < 0.12


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", [WIDE, NARROW], ids=str)
def test_every_candidate_of_decode_is_exact(case: cases.Case) -> None:
    batch = cases.make_batch(case, "cuda")
    cases.write_reference(batch)
    want, want_lse = cases.decode_reference(batch)
    seen = torch.isfinite(want_lse)
    for config in decode_configs(case):
        out, lse = cases.decode_kernel(batch, torch.float32, config)
        assert cases.relative_error(out, want) < tolerances.DECODE[torch.float32], config
        assert (lse - want_lse)[seen].abs().max() < tolerances.LSE and (out[~seen] == 0).all(), config
