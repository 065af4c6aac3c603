"""What the engine trusts nobody with: requests that cannot be, or are late; plans that break a contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from luce_core.contracts import GenerationRequest, SeqId, SeqView, Work
from luce_core.errors import PluginError


def request_problem(request: GenerationRequest, context: int, vocab: int) -> str | None:
    """Why the request cannot be served. Callers check before they submit."""
    if not request.prompt:
        return "The prompt is empty. Send at least one token."
    if len(request.prompt) >= context:
        return f"The prompt has {len(request.prompt)} tokens; context {context} includes the answer."
    bad = next((token for token in request.prompt if not 0 <= token < vocab), None)
    if bad is not None:
        return f"Token {bad} is outside the vocabulary of {vocab}."
    bad = next((token for token in request.params.logit_bias if not 0 <= token < vocab), None)
    if bad is not None:
        return f"Token {bad} of logit_bias is outside the vocabulary of {vocab}."
    if request.keys and len(request.keys) != len(request.prompt):
        return f"{len(request.keys)} cache keys for {len(request.prompt)} prompt tokens. Send one per token."
    end = 0
    for number, span in enumerate(request.media):
        height, width = span.media.grid
        if not end <= span.first < span.stop < len(request.prompt) or height * width != span.media.rows:
            at = f"rows {span.first} to {span.stop} of {len(request.prompt)}, {height} x {width}"
            return f"Image {number} takes {at}. They must be in order, with text behind the last."
        end = span.stop
    if request.max_tokens < 0:
        return f"max_tokens is {request.max_tokens}; it must be 0 or more."
    return None


def late_error(request: GenerationRequest, *, queued: bool) -> str:
    """Of a request whose deadline passed before it had anything to show."""
    where = "in the queue" if queued else "while its prompt was processed"
    return (
        f"The deadline of {request.deadline_s:g} s passed {where}, before the first token. Allow more time, "
        "send a shorter prompt, or try when less is going on."
    )


def late_notice(request: GenerationRequest) -> str:
    """Of one that ends with what it has."""
    return f"the deadline of {request.deadline_s:g} s passed: the answer ends early"


def no_room_error(tokens: int) -> str:
    """Of a request that nothing else is in the way of, and that still does not fit."""
    return (
        f"The cache cannot hold this request's {tokens} tokens beside what runs. Raise --cache-bytes "
        "or shorten the prompt."
    )


def check_work(work: Sequence[Work], views: Mapping[SeqId, SeqView], row_budget: int) -> None:
    """Raise PluginError for work that must not reach the device."""
    rows = sum(item.rows for item in work)
    if rows > row_budget:
        raise PluginError(f"The scheduler planned {rows} rows; the budget is {row_budget}.")
    seen: set[SeqId] = set()
    for item in work:
        view = views.get(item.seq)
        if view is None or item.seq in seen or item.rows < 1:
            raise PluginError(f"The scheduler planned {item}, which is stale, empty or there twice.")
        seen.add(item.seq)
        end = view.length + item.rows
        if end > view.barrier:
            at = f"{item} at {view.length}"
            raise PluginError(f"The scheduler planned {at}, beyond barrier {view.barrier}.")
        if item.phase == "prefill" and any(first < end < last for first, last in view.spans):
            raise PluginError(f"The scheduler planned {item}, which ends at {end} and cuts {view.spans}.")
