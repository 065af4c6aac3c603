"""Fields both OpenAI completion formats share: those that choose tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from attrs import evolve
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.requests import Request

from luce_core.contracts import (
    SamplingParams,
)
from luce_core.errors import RequestError
from luce_core.server.body import read_json
from luce_core.server.errors import from_validation
from luce_core.server.service import Generation, GenerationService, seeded
from luce_core.server.settings import ServerSettings
from luce_core.text import Tokenizer

MAX_N = 16
MAX_ALTERNATIVES = 20
MAX_TIMEOUT_S = 7 * 24 * 3600.0
SEED_MASK = (1 << 64) - 1

LARGEST = (1 << 31) - 1  # whole numbers end up in columns of fixed width

Count = Annotated[int, Field(ge=0, le=LARGEST)]
Breaker = Annotated[str, Field(max_length=64)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class StreamOptions(BaseModel):
    include_usage: bool = False


class SamplingFields(BaseModel):
    """The base of both bodies. Unknown fields are ignored: clients add new ones every week."""

    model_config = ConfigDict(extra="ignore", strict=False)

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None
    min_p: Probability | None = None
    typical_p: Probability | None = None
    seed: int | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    top_n_sigma: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    dry_multiplier: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    dry_base: Annotated[float, Field(ge=1.0, le=100.0)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Field(max_length=32)] = ["\n", ":", '"', "*"]
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    min_tokens: Count = 0
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    """Log-probabilities of the prompt, with so many alternatives; vLLM's field and answer."""
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-LARGEST, le=LARGEST)] = 0
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    """Seconds the request may take, its wait included."""

    @field_validator("stop")
    @classmethod
    def _some_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > 16 or any(not stop or len(stop) > 1024 for stop in stops):
            raise ValueError("at most 16 stop strings of 1 to 1024 characters")
        return value

    @property
    def num_choices(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(
        self, defaults: SamplingParams, alternatives: int | None, tokenizer: Tokenizer
    ) -> SamplingParams:
        """The request's choices over the model's defaults. alternatives: per token; None = no logprobs."""
        chosen: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repetition": self.repetition_penalty,
            "frequency": self.frequency_penalty,
            "presence": self.presence_penalty,
            "logit_bias": self.logit_bias,
            "top_n_sigma": self.top_n_sigma,
            "xtc_probability": self.xtc_probability,
            "xtc_threshold": self.xtc_threshold,
            "dry_multiplier": self.dry_multiplier,
            "dry_base": self.dry_base,
            "dry_allowed_length": self.dry_allowed_length,
            "dry_range": None if self.dry_penalty_last_n is None else max(self.dry_penalty_last_n, 0),
        }
        params = evolve(defaults, **{name: value for name, value in chosen.items() if value is not None})
        if params.dry_multiplier > 0.0:
            breakers = (tokenizer.tokens_with(text) for text in self.dry_sequence_breakers if text)
            params = evolve(params, dry_breakers=frozenset().union(*breakers))
        return seeded(
            evolve(
                params,
                logprobs=0 if alternatives is None else 1 + alternatives,
                min_tokens=self.min_tokens,
                stop_ids=tuple(self.stop_token_ids),
            ),
            self.seed,
        )

    def generations(
        self,
        request: Request,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int | None,
        api: str,
        prompt_logprobs: int | None = None,
    ) -> list[Generation]:
        """The `n` answers to one prompt; choice i draws with the request's seed + i, the first one scores the
        prompt where `prompt_logprobs` says how many alternatives are wanted.
        """
        service: GenerationService = request.app.state.service
        limits = (self.timeout, request.app.state.settings.request_timeout_s)
        first = Generation(
            prompt=tuple(prompt),
            params=params,
            max_tokens=max_tokens,
            stops=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
            api=api,
            model=self.model or service.face.id,
            client=request.client.host if request.client else "",
            priority=self.priority,
            tenant=getattr(request.state, "tenant", ""),
            deadline_s=min((limit for limit in limits if limit), default=None),
        )
        return [
            evolve(
                first,
                params=evolve(params, seed=(params.seed + choice) & SEED_MASK),
                prompt_logprobs=None if choice else prompt_logprobs,
            )
            for choice in range(self.num_choices)
        ]


Body = TypeVar("Body", bound=BaseModel)
Fields = TypeVar("Fields", bound=SamplingFields)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The request's JSON as `kind`. Raises RequestError naming the wrong field."""
    settings: ServerSettings = request.app.state.settings
    raw = await read_json(request, settings.body_limit_bytes)
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise from_validation(error) from None


async def read_fields(request: Request, kind: type[Fields]) -> Fields:
    """`read_body`, checked against the model that is loaded."""
    service: GenerationService = request.app.state.service
    body = await read_body(request, kind)
    if request.app.state.settings.strict_model and body.model != service.face.id:
        raise RequestError(
            f"Model {body.model!r} is not loaded; {service.face.id!r} is.",
            status=404,
            code="model_not_found",
            param="model",
        )
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "Field 'prompt_logprobs': streams have no place for it. Leave out 'stream', or ask "
            "/v1/completions for 'echo' and 'logprobs'.",
            param="prompt_logprobs",
        )
    check_ids(service.face.tokenizer, body.logit_bias or {}, "logit_bias")
    check_ids(service.face.tokenizer, body.stop_token_ids, "stop_token_ids")
    return body


def check_ids(tokenizer: Tokenizer, ids: Any, field: str) -> None:
    """Raise RequestError naming `field` when one of `ids` is not in the vocabulary."""
    size = tokenizer.vocab_size
    bad = next((token for token in ids if not 0 <= token < size), None)
    if bad is not None:
        raise RequestError(f"Field {field!r}: token {bad} is outside 0..{size - 1}.", param=field)
