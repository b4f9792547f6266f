"""What this package needs of vLLM: every name that it calls or replaces, checked before anything is touched."""

from integration.compat.contract import KNOWN, check_queue, missing, own_version, vllm_version

__all__ = ["KNOWN", "check_queue", "missing", "own_version", "vllm_version"]
