"""``kvq calibrate MODEL -o FILE``: measure a model's keys on texts and write the transforms of its layers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from tabulate import tabulate

from bench import texts
from bench.accuracy import load_model
from bench.models import model_path
from kvq.calibrate import Calibration, calibrate, save_calibration


def report(calibration: Calibration) -> str:
    """A line a layer: what INT4 keys do to its scores, and the digest of its transform."""
    lines = [
        [
            r.layer,
            f"{r.plain_noise:.2f}",
            f"{r.noise:.2f}",
            r.pairs,
            transform.digest,
            "plain INT4 hurts" if r.hurt else "",
        ]
        for r, transform in zip(calibration.report, calibration.transforms, strict=True)
    ]
    head = ["layer", "plain INT4", "calibrated", "pairs", "transform", ""]
    return tabulate(lines, head, tablefmt="github", disable_numparse=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvq calibrate", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="packaged model or a local Hugging Face folder")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--text", type=Path, action="append", metavar="FILE", help="text files to calibrate on (repeatable)"
    )
    source.add_argument("--data", type=Path, help="folder with wikitext2 and agent-traces; default: the shipped text")
    parser.add_argument(
        "--pairs", type=int, help="rotary pairs of a head that carry the offset; default: as few as needed"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.pairs is not None and args.pairs < 0:
        parser.error(f"--pairs is {args.pairs}; it must not be negative")

    model, encode = load_model(model_path(args.model), args.device)
    if args.text:
        ids = [encode(path.read_text()) for path in args.text]
    elif args.data:
        ids = [list(w.ids) for w in texts.windows(encode, "calibration", args.data)]
    else:
        ids = [encode(texts.SHIPPED.read_text())]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Calibrating", total=sum(map(len, ids)))
        calibration = calibrate(
            model, ids, offset_pairs=args.pairs, progress=lambda done: progress.update(task, completed=done)
        )
    save_calibration(calibration, args.out)
    print(report(calibration))
    print("\nStandard deviation of the error of an attention score (nats) in the worst head, predicted.")
    measured = f"{len(calibration.transforms)} layers, {calibration.tokens} tokens, model {calibration.model_digest}"
    print(f"{args.out}: {measured}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
