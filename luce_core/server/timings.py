"""What a request cost: the one `usage.timings` of every API format, streamed or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict, frozen

from luce_core.contracts import Finish


@frozen
class Timings:
    """What stands under `usage.timings`; a field that is None does not apply and is left out.

    Several answers to one request count together: times are the longest, since they run together, tokens are
    added up, and a prompt counts once however many answers it gets.
    """

    prefill_ms: float | None = None
    """From admission to the first token of the answer, or to the end where none was made."""
    decode_ms: float | None = None
    """From the first token to the end; absent where no second token was made."""
    decode_tokens_per_sec: float | None = None
    """Tokens behind the first over `decode_ms`."""
    cached_prefix_tokens: int | None = None
    """Of the prompt, what came from the cache when the request was admitted."""
    prefilled_tokens: int | None = None
    """Of the prompt, what was computed for this request."""
    agent_turn_cache_hit: bool | None = None
    """The cached prefix reaches the end of an earlier answer: the prompt begins with all of an earlier
    request, its prompt and its answer up to the last token but one, and nothing of that had to be
    computed again. A shared system prompt alone is no hit, nor is the same prompt asked again, nor an
    answer that was cancelled or cut by a stop string. True if every prompt of the request hit. Absent
    where no cached prefix was looked for.
    """
    accept_rate: float | None = None
    """Candidate tokens that became text, of those verified; absent where there were none."""

    def fields(self) -> dict[str, Any]:
        """As JSON carries it."""
        found = asdict(self, filter=lambda _, value: value is not None)
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def timings_of(finishes: Sequence[Finish], per_prompt: int = 1) -> Timings:
    """finishes: in the order of the choices, `per_prompt` of them for each prompt."""

    def added(name: str) -> int:
        return sum(finish.usage.get(name, 0) for finish in finishes)

    prefill_ms = max(finish.timings["prefill_ms"] for finish in finishes)
    decoded = sum(max(finish.usage["completion_tokens"] - 1, 0) for finish in finishes)
    decode_ms = max(finish.timings["decode_ms"] for finish in finishes)
    timed = decoded > 0 and decode_ms > 0
    drafted = added("drafted_tokens")
    prompt, cached = prompt_tokens(finishes, per_prompt)
    turns = [finish.usage.get("cached_turn") for finish in finishes]
    ran = prefill_ms > 0
    return Timings(
        prefill_ms=prefill_ms if ran else None,
        decode_ms=decode_ms if timed else None,
        decode_tokens_per_sec=decoded / decode_ms * 1e3 if timed else None,
        cached_prefix_tokens=cached if ran else None,
        prefilled_tokens=prompt - cached if ran else None,
        agent_turn_cache_hit=None if None in turns else all(turns),
        accept_rate=added("accepted_tokens") / drafted if drafted else None,
    )


def prompt_tokens(finishes: Sequence[Finish], per_prompt: int) -> tuple[int, int]:
    """(tokens of all prompts, those of them that every answer to the prompt found cached)."""
    groups = [finishes[start : start + per_prompt] for start in range(0, len(finishes), per_prompt)]
    return (
        sum(group[0].usage["prompt_tokens"] for group in groups),
        sum(min(finish.usage["cached_tokens"] for finish in group) for group in groups),
    )
