"""Writes `data/vocabularies.json.xz`: real vocabularies cut down to test texts, and ids others give these.

    python tests/text/make_vocabulary_fixture.py SDIST [PEER_PYTHON]

SDIST: the unpacked source distribution of llama-cpp-python 0.3.36, of which `vendor/llama.cpp/models` holds
`ggml-vocab-*.gguf` with `.inp`/`.out` pairs: texts, and the ids the models' own tokenizers gave them.
PEER_PYTHON: an interpreter with llama-cpp-python 0.3.36 installed; it tokenizes random texts with the
vocabularies, also under pre-tokenizers no vocabulary file is there for.

Cutting down is exact: a token or merge whose text occurs in no test text can never take part in its encoding.
"""

import json
import lzma
import random
import subprocess
import sys
from pathlib import Path

from luce_core.gguf import read_header
from luce_core.text.merging import BYTE_CHARACTERS

DATA = Path(__file__).parent / "data" / "vocabularies.json.xz"
SEPARATOR = "\n__ggml_vocab_test__\n"
NAMES = (
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm",
    "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
# Splitters of architectures whose vocabulary is not at hand, run over one that is.
BORROWED = {
    "starcoder": ("smollm",),
    "qwen2": ("deepseek-v3", "joyai-llm", "laguna", "bailingmoe2", "gpt-4o", "glm4", "seed-coder", "default"),
    "llama-bpe": ("tekken",),
}
SCRIPTS = (  # noqa: SIM905
    "a B z Z e 's 'S 're 'LL ’s 1 12 345 6789 ٣ ½ ² Ⅷ é ñ ß ſ Ωμ Привет пока 漢字 かな カタ 한국어 العربية"
    " עברית हिन्दी ไทย ქართული 😀 👩‍👩‍👧 🏳️‍🌈 🇺🇸 ! ?! ... -- == < | > <| |> ( ) { } $ € + ^ ~ ` _ # @ / \\ '"
    " \" camelCase HTTPServer don't ！ ， 。 “ ” x=1; <|im_end|> <|eot_id|> <turn|> </s> <｜User｜> <think>"
).split(" ")
BLANKS = [" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", *"\u00a0\u2003\u200d", "e\u0301", "\u2028", "\ufffd"]
PEER = """
import json, sys, llama_cpp
path, pre, texts = json.load(sys.stdin)
keys = {"tokenizer.ggml.pre": pre} if pre else None
model = llama_cpp.Llama(path, vocab_only=True, kv_overrides=keys, verbose=False)
print(json.dumps([model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]))
"""


def random_texts(seed: str, count: int = 120) -> list[str]:
    choose = random.Random(seed)

    def word(_):
        return choose.choice(choose.choice((SCRIPTS, BLANKS)))

    return ["".join(map(word, range(choose.randint(1, 14)))) for _ in range(count)]


def recorded(folder: Path, name: str) -> list[dict]:
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text().split("\n")
    return [
        {"pre": None, "by": "hugging face", "text": text, "ids": [int(word) for word in line.split()]}
        for text, line in zip(texts, lines, strict=False)
    ]


def asked(folder: Path, name: str, python: str) -> list[dict]:
    cases = []
    for pre in (None, *BORROWED.get(name, ())):
        texts = random_texts(f"{name} {pre}")
        job = json.dumps([str(folder / f"ggml-vocab-{name}.gguf"), pre, texts])
        done = subprocess.run([python, "-c", PEER], input=job, capture_output=True, text=True, check=True)
        cases += [
            {"pre": pre, "by": "llama.cpp", "text": text, "ids": ids}
            for text, ids in zip(texts, json.loads(done.stdout), strict=True)
        ]
    return cases


def cut_down(metadata: dict, cases: list[dict]) -> dict:
    marked = metadata["tokenizer.ggml.model"] != "gpt2"
    corpus = "\0".join(
        "\u2581" + case["text"].replace(" ", "\u2581") if marked
        else "".join(BYTE_CHARACTERS[byte] for byte in case["text"].encode())
        for case in cases
    )  # fmt: skip
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = [int(kind) for kind in metadata["tokenizer.ggml.token_type"]]
    scores = metadata.get("tokenizer.ggml.scores")
    kept = [
        [token, text, types[token], None if scores is None else float(scores[token])]
        for token, text in enumerate(tokens)
        if (types[token] != 1 and not text.startswith("[PAD")) or text in corpus or len(text) == 1
    ]
    texts = {text for _, text, _, _ in kept}
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges", ()):
        cut = merge.index(" ", 1)
        if merge[:cut] + merge[cut + 1 :] in texts:
            merges.append(merge)
    rest = {
        key: value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.") and isinstance(value, (str, int, float, bool))
    }
    return {"keys": rest, "size": len(tokens), "tokens": kept, "merges": merges, "cases": cases}


def main() -> None:
    folder = Path(sys.argv[1]) / "vendor" / "llama.cpp" / "models"
    vocabularies = {}
    for name in NAMES:
        cases = recorded(folder, name)
        if len(sys.argv) > 2:
            cases += asked(folder, name, sys.argv[2])
        metadata = read_header(folder / f"ggml-vocab-{name}.gguf").metadata
        vocabularies[name] = cut_down(dict(metadata), cases)
        print(name, len(cases), len(vocabularies[name]["tokens"]), len(vocabularies[name]["merges"]))
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_bytes(lzma.compress(json.dumps(vocabularies, ensure_ascii=False).encode(), preset=9))
    print(DATA, DATA.stat().st_size)


if __name__ == "__main__":
    main()
