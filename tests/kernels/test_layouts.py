"""A layout that the inline assembly is not written for is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvq.kernels import layouts

MMA = "#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [1, 1], instrShape = [16, 8]}>\n"
SPREAD = "#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [1, 8], instrShape = [16, 8]}>\n"
OPERAND = (
    "#l = #ttg.linear<{register = [[1, 0], [8, 0], [16, 0], [32, 0]], "
    "lane = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], warp = [], block = []}>\n"
)
OTHER = OPERAND.replace("[[1, 0], [8, 0]", "[[8, 0], [1, 0]")
TRANSPOSE = '%0 = tt.elementwise_inline_asm "movmatrix.sync" {pure = false} %p : tensor<64x8xf16, {}> -> tensor\n'
BY_COLUMN = '%1 = tt.elementwise_inline_asm "mma.sync" {pure = false} %p, %y : tensor<64x8xf16, {}>, tensor\n'
BY_ROW = '%1 = tt.elementwise_inline_asm "%laneid; mma.sync" {pure = false} %p, %y : tensor<16x64xf16, {}>, tensor\n'


def text(layout: str, *code: tuple[str, str]) -> str:
    return layout + "".join(line.replace("{}", name) for line, name in code)


@pytest.mark.parametrize(
    ("ttgir", "found"),
    [
        (text(MMA + OPERAND, (TRANSPOSE, "#mma"), (BY_COLUMN, "#l")), (1, 0)),
        (text(MMA + OPERAND, (TRANSPOSE, "#l"), (BY_COLUMN, "#l")), (1, 1)),
        (text(MMA + OPERAND, (TRANSPOSE, "#mma"), (BY_COLUMN, "#mma")), (1, 1)),
        (text(MMA + OTHER, (TRANSPOSE, "#mma"), (BY_COLUMN, "#l")), (1, 1)),
        (text(MMA, (BY_ROW, "#mma")), (0, 0)),
        (text(SPREAD, (BY_ROW, "#mma")), (0, 1)),
        (text(MMA + OPERAND, (BY_ROW, "#l")), (0, 1)),
        (MMA, (0, 0)),
    ],
)
def test_misplaced_assembly_is_found(ttgir: str, found: tuple[int, int]) -> None:
    assert layouts.placement(ttgir) == found


def test_a_kernel_with_misplaced_assembly_is_refused_and_a_good_one_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layouts, "_seen", set())
    layouts.check(None)
    bad = SimpleNamespace(hash="a", name="decode_kernel", asm={"ttgir": text(SPREAD, (BY_ROW, "#mma"))})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lays out decode_kernel in a way that kvq does not know"):
            layouts.check(bad)
    good = SimpleNamespace(hash="b", name="decode_kernel", asm={"ttgir": text(MMA, (BY_ROW, "#mma"))})
    layouts.check(good)
    layouts.check(SimpleNamespace(hash="b", name="decode_kernel", asm={}))


def test_a_kernel_that_cannot_be_looked_at_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(layouts, "_seen", set())
    for _ in range(2):
        layouts.check(SimpleNamespace(hash="c", name="decode_kernel", asm={"cubin": b""}))
    assert [r.getMessage() for r in caplog.records] == [
        "the layouts of decode_kernel cannot be checked: TRITON_STORE_BINARY_ONLY is set"
    ]
