"""Which program a request belongs to: what the client says, vLLM's session, or what its prompt continues."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from retention.hints import HintReader, Hints
from retention.programs import ProgramKey

MAX_TAILS = 4096  # finished requests that a prompt can be found to continue
MAX_TWINS = 8  # of those, with the same blocks and different last tokens


class Identity(NamedTuple):
    """program: None for a request that belongs to none. source: "id", "session", "prefix" or ""."""

    program: ProgramKey | None
    hints: Hints
    source: str


class _Tail(NamedTuple):
    """The end of a finished request: tokens after its last full block, and whose it was."""

    tokens: list[int]
    owner: ProgramKey  # with an empty program_id if nobody's yet


class Identifier:
    """Reads requests. `finished` remembers how they ended, so that the next prompt of an agent that sends no id is
    recognised: it begins with all tokens of the last turn, output included, under the same salt, adapter and tenant.
    """

    def __init__(self, trust_tenant: bool, block_tokens: int) -> None:
        self._reader = HintReader(trust_tenant)
        self._block_tokens = block_tokens
        self._tails: OrderedDict[Any, list[_Tail]] = OrderedDict()

    def identify(self, request: Any) -> Identity:
        """Raises nothing for what a client may send."""
        extra = extra_args(request)
        salt, adapter = request.cache_salt or "", getattr(request.lora_request, "lora_name", "") or ""
        program, hints = self._reader.read(extra, salt=salt, adapter=adapter)
        if program is not None:
            return Identity(program, hints, "id")
        nobody = self.nobody(request)
        session = getattr(request, "session_id", None)
        if isinstance(session, str) and session:
            return Identity(nobody._replace(program_id=f"session:{session}"[:256]), hints, "session")
        program = self._continued(request, nobody)
        return Identity(program, hints, "prefix" if program else "")

    def nobody(self, request: Any) -> ProgramKey:
        """The request's tenant, salt and adapter, without a program."""
        extra = {**extra_args(request), "kvq_program_id": "?"}
        adapter = getattr(request.lora_request, "lora_name", "") or ""
        key, _ = self._reader.read(extra, salt=request.cache_salt or "", adapter=adapter)
        assert key is not None
        return key._replace(program_id="")

    def finished(self, request: Any, tokens: int, owner: ProgramKey) -> None:
        """A request ended with `tokens` computed tokens."""
        full = min(tokens // self._block_tokens, len(request.block_hashes))
        if full == 0 or tokens <= request.num_prompt_tokens:  # the same prompt again continues nothing
            return
        rest = list(request.all_token_ids[full * self._block_tokens : tokens])
        tails = self._tails.setdefault(request.block_hashes[full - 1], [])
        self._tails.move_to_end(request.block_hashes[full - 1])
        tails[:] = [t for t in tails if t.tokens != rest or t.owner[1:] != owner[1:]][-MAX_TWINS + 1 :]
        tails.append(_Tail(rest, owner))
        if len(self._tails) > MAX_TAILS:
            self._tails.popitem(last=False)

    def clear(self) -> None:
        """Forget how requests ended."""
        self._tails.clear()

    def _continued(self, request: Any, nobody: ProgramKey) -> ProgramKey | None:
        hashes = request.block_hashes
        if not self._tails:
            return None
        for i in range(len(hashes) - 1, -1, -1):
            tails = self._tails.get(hashes[i])
            if tails is None:
                continue
            start = (i + 1) * self._block_tokens
            for tail in reversed(tails):
                end = start + len(tail.tokens)
                if tail.owner[1:] != nobody[1:] or request.num_prompt_tokens <= end:
                    continue
                if list(request.all_token_ids[start:end]) == tail.tokens:
                    return tail.owner if tail.owner.program_id else made_up(nobody, hashes[i])
        return None


def made_up(nobody: ProgramKey, block_hash: Any) -> ProgramKey:
    """A program for requests that name none, called after the content of its first turn."""
    name = block_hash.hex() if isinstance(block_hash, bytes) else f"{hash(block_hash) & (1 << 64) - 1:x}"
    return nobody._replace(program_id=f"prefix:{name[:16]}")


def extra_args(request: Any) -> Mapping[str, Any]:
    """`SamplingParams.extra_args` of a request, {} without."""
    extra = getattr(request.sampling_params, "extra_args", None)
    return extra if isinstance(extra, Mapping) else {}
