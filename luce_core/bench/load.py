"""Requests against a server, so many at a time: one rung of a ladder after another."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from luce_core.bench.client import Broken, Reply, Target, Unreachable, connect, fetch, generate
from luce_core.bench.energy import Energy, Meter
from luce_core.bench.stats import Percentiles, percentiles
from luce_core.bench.timeline import Answer
from luce_core.errors import EngineError, LuceError, UsageError

TEXT = (
    "apple river stone light paper cloud green house music table water bread glass night north train "
    "ocean plant sugar tiger uncle voice wheel youth zebra angle brick chair dream earth field grass "
    "honey ivory jewel knife lemon metal nurse olive piano queen robot snake tower umbra valve whale "
    "birth coast drum eagle flame giant heart index judge king ladder maple novel orbit pearl quiet "
    "ranch salad thumb urban "
)
WORDS = tuple(TEXT.split())
"""Short common words: about one token each in most vocabularies."""
OPTIONAL = ("ignore_eos", "stream_options")
"""Fields beyond the oldest API, in the order they are given up when a server refuses them."""


class Gone(EngineError):
    """The server died in the middle."""


@frozen
class Prompt:
    """What one request asks; messages, or a text."""

    messages: Sequence[Mapping[str, Any]]

    def body(self, model: str, max_tokens: int) -> dict[str, Any]:
        """The request, before optional fields are given up."""
        return {
            "model": model,
            "messages": list(self.messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }


@frozen
class Server:
    """Whom we ask, and what it takes."""

    target: Target
    model: str
    software: str
    """Its `server` header."""
    given_up: tuple[str, ...] = ()
    """Optional fields it refused."""

    def ask(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        """The body of one request."""
        body = prompt.body(self.model, max_tokens)
        return {name: value for name, value in body.items() if name not in self.given_up}


@frozen
class Rung:
    """So many requests at a time."""

    concurrency: int
    prompt_words: int | None
    """None where the prompts come from a file."""
    answers: tuple[Answer, ...]
    seconds: float
    """From the first request to the last end."""
    energy: Energy | None = None

    @property
    def whole(self) -> list[Answer]:
        """Those that ended well."""
        return [answer for answer in self.answers if answer.end == "ok"]

    @property
    def ends(self) -> Counter[str]:
        """How many ended how."""
        return Counter(answer.end for answer in self.answers)

    @property
    def reasons(self) -> Counter[str]:
        """Why the others did not, with their number."""
        return Counter(f"{a.end}: {a.reason}" for a in self.answers if a.end not in ("ok", "rejected"))

    @property
    def ttft_s(self) -> Percentiles | None:
        """To the first token."""
        return percentiles([a.ttft_s for a in self.whole if a.ttft_s is not None])

    @property
    def gap_s(self) -> Percentiles | None:
        """Between chunks, over all answers."""
        return percentiles([gap for answer in self.whole for gap in answer.gaps_s])

    @property
    def request_tokens_s(self) -> Percentiles | None:
        """Of each answer, after its first token."""
        return percentiles([a.tokens_s for a in self.whole if a.tokens_s is not None])

    @property
    def tokens(self) -> int:
        """Of all answers that ended well."""
        return sum(answer.tokens for answer in self.whole)

    @property
    def total_tokens_s(self) -> float:
        """All of them over all the time."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


# --- prompts


def random_prompts(words: int, seed: int) -> Iterator[Prompt]:
    """Without end. They differ from the first words on, so that hardly any prefix is cached."""
    source = random.Random(f"{seed} {words}")
    while True:
        text = " ".join(source.choice(WORDS) for _ in range(words))
        yield Prompt(({"role": "user", "content": text},))


def read_prompts(path: Path) -> list[Prompt]:
    """Lines of {"prompt": text} or {"messages": [...]}. UsageError names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {str(path)!r} cannot be read: {error}.") from error
    found = [_read_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"--prompts {str(path)!r} holds no prompt. Write one JSON object a line.")
    return found


def _read_prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        item = json.loads(line)
    except ValueError:
        item = None
    if isinstance(item, dict):
        text, messages = item.get("prompt"), item.get("messages")
        if isinstance(text, str) and text and messages is None:
            return Prompt(({"role": "user", "content": text},))
        listed = isinstance(messages, list) and all(isinstance(item, dict) for item in messages)
        if listed and messages and text is None:
            return Prompt(tuple(messages))
    raise UsageError(
        f"--prompts {str(path)!r}, line {number}: {line[:60]!r}. Wanted an object with 'prompt' (text) or "
        "'messages' (a list of objects)."
    )


def cycle_prompts(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """Again and again, in order."""
    while True:
        yield from prompts


# --- before


async def find_server(target: Target, model: str | None) -> Server:
    """Ask what it serves. One sentence says what is wrong: nobody there, a key, another API."""
    reply = await _first_words(target)
    if reply.status in (401, 403):
        had = "refuses the key" if target.key else "wants a key"
        raise UsageError(f"{target.url} {had}: {reply.message} Give it with --api-key.")
    if reply.status == 404 and model is not None:  # not every server lists its models
        return Server(target, model, reply.headers.get("server", ""))
    names = _model_names(reply)
    if names is None:
        raise UsageError(
            f"GET {target.url}/models answered {reply.status}, wanted a list of models: {reply.message} "
            "--url takes the address of an OpenAI-compatible server."
        )
    if model is None and not names:
        raise UsageError(f"{target.url} serves no model.")
    return Server(target, model or names[0], reply.headers.get("server", ""))


async def _first_words(target: Target) -> Reply:
    try:
        return await fetch(target, "GET", "/models")
    except (Unreachable, Broken) as error:
        raise UsageError(f"Nobody answers at {target.url}: {error}. Is the server running?") from error
    except TimeoutError:
        raise UsageError(f"{target.url} said nothing for {target.timeout_s:g} s.") from None


def _model_names(reply: Reply) -> list[str] | None:
    if reply.status != 200:
        return None
    try:
        data = json.loads(reply.body)["data"]
        return [str(item["id"]) for item in data]
    except (ValueError, KeyError, TypeError):
        return None


async def warm_up(server: Server, prompt: Prompt, max_tokens: int) -> Server:
    """One request that is not measured; finds out which optional fields the server takes."""
    path = "/chat/completions"
    given_up = 0
    while True:
        tried = evolve(server, given_up=OPTIONAL[:given_up])
        try:
            answer = await generate(tried.target, path, tried.ask(prompt, max_tokens))
        except Unreachable as error:
            raise UsageError(f"Nobody answers at {tried.target.url}: {error}.") from error
        refused = answer.reason.startswith(("HTTP 400", "HTTP 422"))
        if refused and given_up < len(OPTIONAL):
            given_up += 1
            continue
        if answer.end in ("ok", "rejected"):
            return tried
        if answer.reason.startswith(("HTTP 401", "HTTP 403")):
            raise UsageError(f"{tried.target.url} lets nobody in: {answer.reason} Give a key with --api-key.")
        raise EngineError(f"The first request to {tried.target.url} failed ({answer.end}). {answer.reason}")


# --- measuring


@frozen
class Ladder:
    """Climbs. `tick` is told when a request ended."""

    server: Server
    max_tokens: int
    meter: Meter | None = None
    tick: Callable[[Answer], None] = lambda answer: None

    async def climb(
        self, concurrency: int, requests: int, prompts: Iterator[Prompt], words: int | None
    ) -> tuple[Rung, Gone | None]:
        """One rung, and whether the server died on it. What came before is in the rung."""
        answers: list[Answer] = []
        gone: list[str] = []
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                if gone:
                    return
                try:
                    answer = await self._one(next(prompts))
                except Unreachable as error:
                    gone.append(str(error))
                    return
                answers.append(answer)
                self.tick(answer)

        if self.meter is not None:
            self.meter.start()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        energy = self.meter.stop() if self.meter is not None else None
        if not gone and any(answer.end == "cut" for answer in answers):
            gone += [reason async for reason in self._probe()]
        rung = Rung(concurrency, words, tuple(answers), _span(answers), energy)
        return rung, self._gone(gone[0], rung) if gone else None

    async def _one(self, prompt: Prompt) -> Answer:
        body = self.server.ask(prompt, self.max_tokens)
        return await generate(self.server.target, "/chat/completions", body)

    async def _probe(self) -> AsyncIterator[str]:
        """Whether a stream that broke off took the server with it."""
        try:
            async with connect(self.server.target):
                return
        except Unreachable as error:
            yield str(error)

    def _gone(self, reason: str, rung: Rung) -> Gone:
        return Gone(
            f"The server at {self.server.target.url} is gone ({reason}), at concurrency {rung.concurrency} "
            f"after {len(rung.answers)} requests of it. Shown is what came before."
        )


def _span(answers: Sequence[Answer]) -> float:
    if not answers:
        return 0.0
    return max(answer.ended_s for answer in answers) - min(answer.sent_s for answer in answers)


def check_some_success(rungs: Sequence[Rung]) -> None:
    """EngineError when nothing at all was measured."""
    if any(rung.whole for rung in rungs):
        return
    reasons = Counter(f"{a.end}: {a.reason}" for rung in rungs for a in rung.answers)
    worst: LuceError = EngineError(
        f"No request of {sum(reasons.values())} ended well. Most often: {reasons.most_common(1)[0][0]}"
        if reasons
        else "No request was answered."
    )
    raise worst
