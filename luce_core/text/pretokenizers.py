"""How each named pre-tokenizer cuts text into words before byte pairs merge inside them.

A GGUF names its splitter in `tokenizer.ggml.pre`. The patterns say what the published `tokenizer.json`
files say, in the dialect of the Oniguruma engine inside `tokenizers`. Each pattern cuts every piece the
previous one left into its matches and what lies between them.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_DIGITS_3 = r"\p{N}{1,3}"
_CJK = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"


def _words(numbers: str, *, letters: str = r"\p{L}", symbols_end: str = r"[\r\n]*") -> str:
    """The pattern family Llama 3 and Qwen share: one leading symbol may join a word, numbers stand alone."""
    inside = letters + r"\p{N}"
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{numbers}"
        rf"| ?[^\s{inside}]+{symbols_end}|{_SPACES}"
    )


def _cased_words(numbers: str, suffix: str = "") -> str:
    """The o200k family: a word is capitals then small letters, so camelCase is cut at the hump."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}[{upper}]*[{lower}]+{suffix}|{lead}[{upper}]+[{lower}]*{suffix}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


# What DeepSeek's first releases list letter by letter: cased letters, without blocks newer than their list.
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8f}\x{2d00}-\x{2d2f}"
    r"\x{a790}-\x{a7ff}\x{ab30}-\x{ab6f}\x{10570}-\x{105bf}\x{10780}-\x{107bf}\x{10d50}-\x{10d8f}\x{16e40}-\x{16eff}"
    r"\x{1d400}-\x{1d7ff}\x{1df00}-\x{1dfff}]]"
)
_DEEPSEEK_SYMBOLS = r"[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]"
_DEEPSEEK_CJK = r"[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK3 = (
    _DIGITS_3,
    _CJK,
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)


@attrs.frozen
class PreTokenizer:
    """One splitter.

    patterns: applied in order, each to the pieces of the one before; empty: the whole text is one word.
    whole_words: a piece that is itself a token is taken whole, before any merge (`ignore_merges`).
    add_bos: what holds when the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


def _named(names: str, pre: PreTokenizer) -> Iterable[tuple[str, PreTokenizer]]:
    return ((name, pre) for name in names.split())


PRE_TOKENIZERS: dict[str, PreTokenizer] = dict(
    [
        *_named(
            "default",
            PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        ),
        *_named(
            "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum a.x-4.0",
            PreTokenizer((_GPT2,)),
        ),
        *_named(
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
            PreTokenizer((_DIGIT, _GPT2)),
        ),
        *_named("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
        *_named(
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            PreTokenizer((_words(_DIGITS_3),), whole_words=True, add_bos=True),
        ),
        *_named("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_words(_DIGITS_3),))),
        *_named("glm4 glm5", PreTokenizer((_words(_DIGITS_3),), whole_words=True)),
        *_named(
            "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open megrez grok-2 kormo",
            PreTokenizer((_words(_DIGIT),)),
        ),
        *_named("qwen35", PreTokenizer((_words(_DIGIT, letters=r"\p{L}\p{M}"),))),
        *_named("laguna", PreTokenizer((r"[^\n]+|\n+", _words(_DIGIT)))),
        *_named("minicpm5", PreTokenizer((_DIGITS_3, _words(r"\p{N}+")), whole_words=True)),
        *_named(
            "bailingmoe bailingmoe2 llada-moe",
            PreTokenizer(
                (
                    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]|\s+(?!\S)|\s+",
                )
            ),
        ),
        *_named(
            "seed-coder",
            PreTokenizer(
                (
                    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
                    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
                )
            ),
        ),
        *_named(
            "deepseek-llm",
            PreTokenizer(
                (
                    r"[\r\n]",
                    rf"\s?{_DEEPSEEK_LETTERS}+",
                    rf"\s?{_DEEPSEEK_SYMBOLS}+",
                    r"\s+$",
                    _DEEPSEEK_CJK,
                    r"\p{N}+",
                )
            ),
        ),
        *_named(
            "deepseek-coder",
            PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT)),
        ),
        *_named("deepseek-v3 joyai-llm hunyuan-dense hy_v4", PreTokenizer(_DEEPSEEK3)),
        *_named("tekken", PreTokenizer((_cased_words(_DIGIT),), whole_words=True, add_bos=True)),
        *_named(
            "gpt-4o llama4 kanana2 talkie minimax-m2",
            PreTokenizer((_cased_words(_DIGITS_3, _CONTRACTIONS + "?"),)),
        ),
    ]
)

# Vocabularies that merge raw UTF-8 with marked spaces; nothing cuts the text but the added tokens.
GEMMA4 = PreTokenizer((), add_bos=True)
SENTENCEPIECE = PreTokenizer((), add_bos=True)
