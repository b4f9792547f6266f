"""What this package needs of vLLM: every name that it calls or replaces, checked before anything is touched."""

from integration.compat.contract import CORE_MODULE, KNOWN, SCHEDULER_MODULE, check_queue, missing, vllm_version

__all__ = ["CORE_MODULE", "KNOWN", "SCHEDULER_MODULE", "check_queue", "missing", "vllm_version"]
