"""What goes over the wire, as the served document describes it: messages in, answers out.

Only descriptions: nothing validates against them while it runs. The tests hold every answer of a real server
against them, field by field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

DOCUMENTED = ConfigDict(use_attribute_docstrings=True)

# --- what comes in, where the request's own model takes more than one shape

Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompts = str | Annotated[list[str], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = StopString | Annotated[list[StopString], Field(max_length=16)] | None


class TextPart(TypedDict):
    type: NotRequired[Literal["text", "input_text", "output_text"]]
    text: str


class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


class ImageUrl(TypedDict):
    __pydantic_config__ = DOCUMENTED  # type: ignore[misc]
    url: Annotated[str, Field(pattern="^(data:|https?://)")]
    """A data URL; where the server allows the host (`--allow-image-urls`) also http and https."""


class ImagePart(TypedDict):
    """PNG, JPEG, WebP or GIF."""

    type: Literal["image_url", "input_image"]
    image_url: str | ImageUrl


TextContent = str | list[str | TextPart | RefusalPart] | None
Content = str | list[str | TextPart | RefusalPart | ImagePart] | None


class FunctionCall(TypedDict):
    name: str
    arguments: NotRequired[str | dict[str, Any] | None]
    """An object, or the JSON text of one."""


class ToolCall(TypedDict):
    __pydantic_config__ = DOCUMENTED  # type: ignore[misc]
    id: NotRequired[str | None]
    type: NotRequired[str]
    function: FunctionCall


class ChatMessage(TypedDict):
    """One message of a conversation. Roles `developer` and `function` count as `system` and `tool`."""

    __pydantic_config__ = DOCUMENTED  # type: ignore[misc]
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: NotRequired[Content]
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCall] | None]
    reasoning_content: NotRequired[TextContent]
    """What an assistant thought before it answered."""


Messages = Annotated[list[ChatMessage], Field(min_length=1)]


class FunctionTool(TypedDict):
    __pydantic_config__ = DOCUMENTED  # type: ignore[misc]
    name: Annotated[str, Field(min_length=1)]
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    """JSON schema of an object: the arguments."""


class Tool(TypedDict):
    type: NotRequired[Literal["function"]]
    function: FunctionTool


Tools = list[Tool] | None
ToolChoice = Literal["auto", "none"] | None

# --- what goes out


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    """The field that is wrong, where one is."""
    code: str


class ErrorAnswer(TypedDict):
    """Every error of every route."""

    error: ErrorFields


class HealthAnswer(TypedDict):
    __pydantic_config__ = DOCUMENTED  # type: ignore[misc]
    status: Literal["ok", "loading", "restarting", "stopped"]
    running: int
    waiting: int
    restarts: int
    """Times the engine was started again."""
    detail: NotRequired[str]
    progress: NotRequired[float]
    """Share of the weights that is loaded, 0..1."""
    retry_in_s: NotRequired[float]


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    max_model_len: int
    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]]
    meta: dict[str, Any]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class DefaultSettings(TypedDict):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_tokens: int | None


class PartAnswer(TypedDict):
    kind: str
    name: str
    plugin: str
    answers: str


class Modalities(TypedDict):
    vision: bool
    audio: bool


class PropsAnswer(TypedDict):
    model_alias: str
    build_info: str
    n_ctx: int
    modalities: Modalities
    chat_template: str
    default_generation_settings: DefaultSettings
    parts: list[PartAnswer]
    model: dict[str, Any]


class PromptDetails(TypedDict):
    cached_tokens: int


class Timings(TypedDict):
    """What a request cost; a field that does not apply is absent. See `luce_core.server.timings`."""

    prefill_ms: NotRequired[float]
    decode_ms: NotRequired[float]
    decode_tokens_per_sec: NotRequired[float]
    cached_prefix_tokens: NotRequired[int]
    prefilled_tokens: NotRequired[int]
    agent_turn_cache_hit: NotRequired[bool]
    accept_rate: NotRequired[float]


class CompletionDetails(TypedDict):
    __pydantic_config__ = DOCUMENTED  # type: ignore[misc]
    reasoning_tokens: int
    """Of thoughts, their tags included."""


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    timings: Timings


class TokenInfo(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(TokenInfo):
    top_logprobs: list[TokenInfo]


class ChatLogprobs(TypedDict):
    content: list[TokenEntry]


class CalledFunction(TypedDict):
    __pydantic_config__ = DOCUMENTED  # type: ignore[misc]
    name: str
    arguments: str
    """A JSON object as text."""


class AnsweredCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    __pydantic_config__ = DOCUMENTED  # type: ignore[misc]
    role: Literal["assistant"]
    content: str | None
    """Null where there are calls and no text."""
    refusal: None
    reasoning_content: NotRequired[str]
    """What the model thought before it answered; absent where it did not."""
    tool_calls: NotRequired[Annotated[list[AnsweredCall], Field(min_length=1)]]


TextReason = Literal["stop", "length", "cancelled"]
TextStreamReason = Literal["stop", "length", "cancelled", "error"]
Reason = Literal["stop", "length", "tool_calls", "cancelled"]
StreamReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


class PromptScore(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptScores = list[dict[str, PromptScore] | None]
"""Per token of the prompt, by id: the token itself and its likeliest alternatives; null for the first."""


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class ChatAnswer(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptScores]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    """The first of a call has its id, type and name, the others more of the arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallDelta]]


class ChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: StreamReason | None


class ChatChunk(TypedDict):
    """One event of a stream. The one with the usage, sent where asked for, has no choices; one with an error
    ends every choice that still ran.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage]
    error: NotRequired[ErrorFields]


class LegacyLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: TextReason
    prompt_logprobs: NotRequired[PromptScores]


class TextAnswer(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class TextChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: TextStreamReason | None


class TextChunk(TypedDict):
    """One event of a stream. The one with the usage, sent where asked for, has no choices; one with an error
    ends every choice that still ran.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: NotRequired[Usage]
    error: NotRequired[ErrorFields]


class Piece(TypedDict):
    id: int
    piece: str | list[int]
    """Text, or the bytes of a part of a character."""


class TokenizeAnswer(TypedDict):
    tokens: list[int] | list[Piece]


class DetokenizeAnswer(TypedDict):
    content: str
