"""The vocabulary of a model as its GGUF metadata states it, checked once and then trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import attrs

from luce_core.errors import ModelFormatError

SPACE_MARK = "\u2581"  # how SentencePiece-style vocabularies spell a space

# A token with one of these texts ends a generation whatever its type says: converters mistype them.
END_TEXTS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>",
        "<|flush|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>",
        "<eos>", "<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~[",
    }
)  # fmt: skip

# Element names that vocabularies trained on web text carry as literals: `<table>` is text, `<think>` a
# marker. `<s>` is missing on purpose: it opens a text far more often than it strikes one out.
_HTML_ELEMENTS = frozenset(
    """
    a abbr address article aside audio b blockquote body br button canvas caption center cite code col
    colgroup dd del div dl dt em embed figcaption figure font footer form h1 h2 h3 h4 h5 h6 head header hr
    html i iframe img input ins kbd label li link main mark meta nav ol option p pre q samp script section
    select small source span strike strong style sub sup svg table tbody td textarea tfoot th thead time
    title tr tt u ul var video
    """.split()  # noqa: SIM905  # 100 strings on 100 lines are no list to read
)
_MARKER_BRACKETS = {"<": ">", "[": "]", "〈": "〉", "＜": "＞", "{": "}"}


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@attrs.frozen(kw_only=True)
class Vocabulary:
    """Tokens and rules of one tokenizer; every id is below `len(tokens)`.

    special: control tokens: never spelled by untrusted text, hidden from generated text.
    markers: user-defined tokens that mark structure (`<think>`, `<tool_call>`): never spelled by untrusted
    text,
        shown.
    literals: user-defined tokens that are plain text (runs of spaces, HTML tags): matched before merging,
        everywhere.
    eog: ids that end a generation.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[str, ...]
    special: frozenset[int]
    markers: frozenset[int]
    literals: frozenset[int]
    eog: frozenset[int]
    bos: int | None
    eos: int | None
    unknown: int | None
    add_bos: bool | None
    add_eos: bool
    add_space_prefix: bool | None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Read and check the `tokenizer.ggml.*` keys; `ModelFormatError` names the key that is wrong."""
        reader = _Reader(metadata)
        model = reader.text("model")
        tokens = reader.tokens()
        types = reader.types(len(tokens))
        ids = {name: reader.token_id(name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown")}
        if model == "llama":
            _sentencepiece_defaults(ids, types)
        special, markers, literals, eog = _classify(tokens, types, ids)
        return cls(
            model=model,
            pre=reader.text("pre", default=""),
            tokens=tokens,
            types=types,
            scores=reader.scores(len(tokens)),
            merges=reader.strings("merges"),
            special=special,
            markers=markers,
            literals=literals,
            eog=eog,
            bos=ids["bos"],
            eos=ids["eos"],
            unknown=ids["unknown"],
            add_bos=reader.flag("add_bos_token"),
            add_eos=bool(reader.flag("add_eos_token")),
            add_space_prefix=reader.flag("add_space_prefix"),
        )


def is_marker(text: str) -> bool:
    """Tell structure (`<tool_call>`, `[INST]`, `<｜User｜>`) from plain text among user-defined tokens."""
    bare = text.strip().strip(SPACE_MARK)
    if len(bare) < 3 or _MARKER_BRACKETS.get(bare[0]) != bare[-1]:
        return False
    name = bare[1:-1].strip("/ ")
    return bool(name) and name.lower() not in _HTML_ELEMENTS and not name.isspace()


def _sentencepiece_defaults(ids: dict[str, int | None], types: tuple[int, ...]) -> None:
    # SentencePiece's own defaults, taken only where the token really is what the default says.
    for name, token, kind in (
        ("unknown", 0, TokenType.UNKNOWN),
        ("bos", 1, TokenType.CONTROL),
        ("eos", 2, TokenType.CONTROL),
    ):
        if ids[name] is None and token < len(types) and types[token] == kind:
            ids[name] = token


def _classify(
    tokens: tuple[str, ...], types: tuple[int, ...], ids: Mapping[str, int | None]
) -> tuple[frozenset[int], frozenset[int], frozenset[int], frozenset[int]]:
    ends = {token for token in (ids["eos"], ids["eot"], ids["eom"]) if token is not None}
    for token, text in enumerate(tokens):
        if text in END_TEXTS or (text == "</s>" and types[token] == TokenType.CONTROL):
            ends.add(token)
    texts = {tokens[token]: token for token in ends}
    # With a separate end for messages and calls, `<|end|>` only closes one part of an answer.
    if "<|end|>" in texts and (
        {"<|return|>", "<|call|>"} <= texts.keys() or {"<|calls|>", "<|flush|>"} <= texts.keys()
    ):
        ends.discard(texts["<|end|>"])
    if "<|tool_response>" in texts and "</s>" in texts and texts["</s>"] != ids["eos"]:
        ends.discard(texts["</s>"])
    named = {token for token in ids.values() if token is not None}
    # A named token that is ordinary text stays ordinary: some files name a newline or "!" as unknown or bos.
    named = {token for token in named if types[token] != TokenType.NORMAL or is_marker(tokens[token])}
    control = {token for token, kind in enumerate(types) if kind in {TokenType.CONTROL, TokenType.UNKNOWN}}
    special = control | named | {t for t in ends if is_marker(tokens[t]) or types[t] != TokenType.NORMAL}
    defined = {token for token, kind in enumerate(types) if kind == TokenType.USER_DEFINED} - special
    markers = frozenset(token for token in defined if is_marker(tokens[token]))
    return frozenset(special), markers, frozenset(defined) - markers, frozenset(ends)


@attrs.frozen
class _Reader:
    metadata: Mapping[str, Any]

    def _get(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise wrong_key(name, f"got {_kind(value)}", "a string")
        return value

    def flag(self, name: str) -> bool | None:
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, str) or value not in (True, False):
            raise wrong_key(name, f"got {value!r}", "true or false")
        return bool(value)

    def strings(self, name: str) -> tuple[str, ...]:
        value = self._get(name)
        if value is None:
            return ()
        items = _listed(name, value)
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise wrong_key(name, f"got {_kind(item)} at index {index}", "strings only")
        return tuple(items)

    def tokens(self) -> tuple[str, ...]:
        tokens = self.strings("tokens")
        if not tokens:
            raise wrong_key("tokens", "got none", "one string per token")
        if len(set(tokens)) != len(tokens):
            first: dict[str, int] = {}
            for token, text in enumerate(tokens):
                if text and text in first:
                    raise wrong_key("tokens", f"got {text!r} as {first[text]} and {token}", "each text once")
                first[text] = token
        return tokens

    def types(self, count: int) -> tuple[int, ...]:
        return tuple(int(kind) for kind in self._numbers("token_type", count)) or (TokenType.NORMAL,) * count

    def scores(self, count: int) -> tuple[float, ...]:
        return tuple(float(score) for score in self._numbers("scores", count))

    def _numbers(self, name: str, count: int) -> list[Any]:
        value = self._get(name)
        if value is None:
            return []
        items = _listed(name, value)
        if len(items) != count:
            raise wrong_key(name, f"got {len(items)} entries", f"{count}, one per token")
        for index, item in enumerate(items):
            if not isinstance(item, (int, float)):
                raise wrong_key(name, f"got {_kind(item)} at index {index}", "numbers only")
        return items

    def token_id(self, name: str, count: int) -> int | None:
        key = f"{name}_token_id"
        value = self._get(key)
        if value is None:
            return None
        try:
            token = int(value)
        except (TypeError, ValueError):
            raise wrong_key(key, f"got {_kind(value)}", "a token id") from None
        if token in {-1, 0xFFFFFFFF}:  # how some converters write "there is none"
            return None
        if not 0 <= token < count:
            raise wrong_key(key, f"got {token}", f"an id below {count}")
        return token


def _listed(name: str, value: Any) -> list[Any]:
    if hasattr(value, "tolist"):  # a numpy array
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise wrong_key(name, f"got {_kind(value)}", "an array")
    return list(value)


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def wrong_key(name: str, got: str, wanted: str) -> ModelFormatError:
    return ModelFormatError(
        f"The vocabulary cannot be read: key 'tokenizer.ggml.{name}': {got}, wanted {wanted}. "
        "Convert the model again, or download another GGUF of it."
    )
