"""The ``kvq`` command: one subcommand a module, each also runnable as ``python -m``."""

from __future__ import annotations

import importlib
import sys

# name: (module with main(argv), what it does). A module is imported only when its command is asked for.
COMMANDS = {
    "demo": ("bench.demo", "agents on a real engine with retention, and a conversation with each storage format"),
    "agents": (
        "bench.agents_demo",
        "agents that pause on tools, on vLLM with little memory, without and with retention",
    ),
    "top": ("bench.top", "live table of the programs of an engine and what is retained of them"),
    "size": ("bench.size", "how many tokens of a model's KV cache a memory budget holds"),
    "calibrate": ("bench.calibrate_cli", "measure a model's keys, so that INT4 stores them better"),
    "tune": ("kvq.tune", "measure launch configurations of the kernels on the GPU at hand"),
    "report": ("bench.retention_report", "what retention did, from its event log"),
    "doctor": ("bench.doctor", "what is installed, what works here, and what to do about the rest"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: kvq COMMAND ...", "", *lines, "", "kvq COMMAND --help describes a command."])


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand and return its exit status. Bad input ends with one line and status 2, without a traceback."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"kvq: there is no command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    except ModuleNotFoundError as error:
        print(f"kvq {name}: {error}; pip install 'kvq-toolkit[transformers,bench]'", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"kvq {name}: {error}", file=sys.stderr)
        return 2
    return 1


if __name__ == "__main__":
    sys.exit(main())
