"""Time of the kernels against the byte limit: ``python -m bench.roofline kernels.json -o DIR``.

Reads what ``pytest bench/kernels --kvq-out DIR`` saved and draws roofline.png and roofline.svg: each row's time over
the bytes it must read, and the line of the read bandwidth that was measured in the same run. The distance to the line
is what is lost.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MARKERS = "osD^vP*X<>"


def read(path: Path) -> dict[str, Any]:
    """A result of the kernel tables. Raises ValueError where it is another file, or one measured without a GPU."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise ValueError(f"{path} has no rows; expected kernels.json of pytest bench/kernels --kvq-out")
    if data.get("read_bw_tb_per_s") is None:
        raise ValueError(f"{path} was measured without a GPU: there is no read bandwidth to compare with")
    return data


def draw(data: dict[str, Any]) -> Any:
    """The figure: log-log, a series for each scheme and peer."""
    bandwidth = data["read_bw_tb_per_s"]
    rows = [row for row in data["rows"] if row["bytes"] and row["q_len"] == 1]
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    sizes = [row["bytes"] / 1e6 for row in rows]
    span = [0.7 * min(sizes), 1.4 * max(sizes)]
    axes.plot(span, [size / bandwidth for size in span], color="black", label=f"byte limit: {bandwidth} TB/s measured")
    axes.plot(span, [2 * size / bandwidth for size in span], color="0.6", linestyle=":", label="half of it")
    for i, scheme in enumerate(dict.fromkeys(row["scheme"] for row in rows)):
        own = [row for row in rows if row["scheme"] == scheme]
        ours = any(row["rel_err"] is not None for row in own)
        axes.scatter(
            [row["bytes"] / 1e6 for row in own],
            [row["time_us"] for row in own],
            marker=MARKERS[i % len(MARKERS)],
            s=45 if ours else 30,
            facecolors=f"C{i % 10}" if ours else "none",
            edgecolors=f"C{i % 10}",
            label=scheme,
            zorder=3,
        )
    axes.set(xscale="log", yscale="log", xlabel="K and V read (MB)", ylabel="time of decode (µs)", xlim=span)
    axes.set_title(f"Decode on {data['device']}, {data['date']}")
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=8)
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="kernels.json of pytest bench/kernels --kvq-out")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("."), metavar="DIR", help="where the figures are written"
    )
    args = parser.parse_args(argv)
    try:
        figure = draw(read(args.result))
    except (OSError, ValueError) as error:
        print(f"bench.roofline: {error}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    for suffix in ("png", "svg"):
        path = args.out / f"roofline.{suffix}"
        figure.savefig(path, dpi=150)
        print(path)
    plt.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
