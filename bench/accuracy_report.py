"""Tables from results of ``bench.accuracy --out``, in Markdown.

``python -m bench.accuracy_report docs/results/accuracy-*.json > docs/results/accuracy.md``
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.accuracy import FORMATS


@dataclass(frozen=True)
class Bar:
    """A target of the project: ``figure`` of a format with a recent window is at most ``limit``."""

    format: str
    window: str
    figure: str  # "kl" or "perplexity_change"
    limit: float

    def shown(self, value: float) -> str:
        return f"{value:.4f}" if self.figure == "kl" else f"{100 * value:+.2f} %"

    @property
    def text(self) -> str:
        name = "KL" if self.figure == "kl" else "perplexity"
        return f"{FORMATS[self.format].text}, window {self.window}: {name} at most {self.shown(self.limit)}"


BARS = (
    Bar("int4-calibrated", "0", "kl", 0.015),
    Bar("int4-calibrated", "0", "perplexity_change", 0.02),
    Bar("int4-calibrated", "128", "kl", 0.004),
    Bar("int4-calibrated", "128", "perplexity_change", 0.005),
    Bar("int4", "0", "kl", 0.045),
    Bar("int4", "128", "kl", 0.008),
    Bar("int8", "0", "kl", 0.002),
)


def command(arguments: dict[str, Any]) -> str:
    """The options of a run that are not defaults, as they were given."""
    options = [f"--model {arguments['model']}"]
    defaults: dict[str, Any] = {"offset": 0, "texts": "evaluation", "limit": None, "more": 1, "every": 1}
    defaults |= {"windows": ["0"], "first": [4], "schemes": list(FORMATS)}
    for name, default in defaults.items():
        value = arguments[name]
        if value != default:
            options.append(f"--{name} {','.join(map(str, value)) if isinstance(value, list) else value}")
    if arguments["calibration"] not in (None, "None"):
        options.append("--calibration FILE")
    return "python -m bench.accuracy " + " ".join(options)


def error(value: float | None, scale: float, digits: int) -> str:
    return "" if value is None else f" ± {scale * value:.{digits}f}"


def table(run: dict[str, Any]) -> str:
    """One run: a line a format, a group of columns a window (and a count of native first tokens)."""
    head, lines = ["format", "bits (D=64 / 128)"], []
    groups = [(w, f) for f in run["arguments"]["first"] for w in run["arguments"]["windows"]]
    for window, first in groups:
        name = "two turns" if window == "turns" else f"window {window}"
        name += "" if len(run["arguments"]["first"]) == 1 else f", first {first}"
        head += [f"{name}: perplexity", "KL", "top-1"]
    for scheme in run["arguments"]["schemes"]:
        bits = FORMATS[scheme].bits
        line = [FORMATS[scheme].text, f"{bits(64):.3f} / {bits(128):.3f}"]
        for window, first in groups:
            row = run["rows"].get(f"{scheme}/{window}/{first}")
            if row is None:
                line += ["", "", ""]
                continue
            change = f"{100 * row['perplexity_change']:+.2f}{error(row['perplexity_error'], 100, 2)} %"
            line += [change, f"{row['kl']:.4f}{error(row['kl_error'], 1, 4)}", f"{100 * row['top1']:.1f} %"]
        lines.append(line)
    return tabulate(lines, head, tablefmt="github", disable_numparse=True)


def targets(runs: dict[str, dict[str, Any]]) -> str:
    """Every bar against every run that measured it."""
    lines = []
    for bar in BARS:
        line = [bar.text]
        for run in runs.values():
            row = run["rows"].get(f"{bar.format}/{bar.window}/4")
            value = None if row is None else row[bar.figure]
            line.append("" if value is None else bar.shown(value) + ("" if value <= bar.limit else " (missed)"))
        lines.append(line)
    return tabulate(lines, ["target (first 4 tokens native)", *runs], tablefmt="github", disable_numparse=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy_report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by bench.accuracy --out")
    files = parser.parse_args(argv).files
    runs = {path.stem.removeprefix("accuracy-"): json.loads(path.read_text()) for path in files}
    print("# Accuracy: all results\n\n`python -m bench.accuracy_report docs/results/accuracy-*.json`\n")
    for name, run in runs.items():
        counts = ", ".join(f"{n} {kind}" for kind, n in run["windows"].items())
        machine = run["machine"]
        names = sorted({f"{FORMATS[s].text}: {n}" for s, n in run["measured"].items() if n != "-"})
        print(f"## {name}\n\n{machine['device']}, torch {machine['torch']}; windows: {counts}\n")
        print(f"```\n{command(run['arguments'])}\n```\n")
        print(table(run) + "\n\nMeasured: " + "; ".join(names) + ".\n")
    print("## Against the targets\n\n" + targets(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
