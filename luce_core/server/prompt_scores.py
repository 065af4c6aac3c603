"""Log-probabilities of prompts: computed for the first answer to a prompt, reported with all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from luce_core.contracts import Failure, Heartbeat, PromptLogprobs, TextEvent, TokenLogprob
from luce_core.server.answers import Answers
from luce_core.server.choices import LOWEST_LOGPROB
from luce_core.server.service import Generation
from luce_core.text import Tokenizer


class SharedScores:
    """`events` of choices that come in groups of `per_prompt`: the first of a group scores their prompt; the
    others get its `PromptLogprobs` as well, and what they have to say themselves after it.
    """

    def __init__(self, events: Answers, wanted: Sequence[Generation], per_prompt: int) -> None:
        self.choices = events.choices
        self.close = events.close
        self._events = events
        self._per_prompt = per_prompt
        self._left = [0] * len(wanted)
        for first, generation in enumerate(wanted):
            if generation.prompt_logprobs is not None:
                self._left[first : first + per_prompt] = [len(generation.prompt) - 1] * per_prompt
        self._early: list[list[TextEvent]] = [[] for _ in wanted]

    def __aiter__(self) -> SharedScores:
        return self

    async def __anext__(self) -> list[tuple[int, TextEvent]]:
        while True:
            batch = [shared for one in await anext(self._events) for shared in self._shared(*one)]
            if batch:
                return batch

    def _shared(self, index: int, event: TextEvent) -> Iterator[tuple[int, TextEvent]]:
        if isinstance(event, PromptLogprobs):
            for choice in range(index, index + self._per_prompt):
                self._left[choice] -= len(event.tokens)
                yield choice, event
                if not self._left[choice]:
                    for late in self._early[choice]:
                        yield choice, late
        elif self._left[index] and not isinstance(event, Heartbeat | Failure):
            self._early[index].append(event)
        else:
            yield index, event


def prompt_scores(
    tokenizer: Tokenizer, items: Sequence[TokenLogprob], most: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: None for the first token, then by id each token and its `most` likeliest
    alternatives, with their ranks.
    """

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_text(token)
        return {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": text}

    scores: list[dict[str, dict[str, Any]] | None] = [None]
    for item in items:
        found = {str(item.token): entry(item.token, item.logprob, item.rank)}
        for rank, (token, logprob) in enumerate(item.top[:most], start=1):
            found.setdefault(str(token), entry(token, logprob, rank))
        scores.append(found)
    return scores
