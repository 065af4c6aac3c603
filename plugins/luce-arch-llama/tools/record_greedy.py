"""Record what Hugging Face transformers answers greedily, as the reference of `tests/test_greedy.py`.

    python tools/record_greedy.py MODEL.gguf tests/fixtures/greedy-smollm2-135m-q4_1.json

The model is transformers' LlamaForCausalLM in float32 on weights that the gguf package dequantized from the
same file; tokenizer and chat template are transformers' too. Nothing of luce-core takes part. Half of the
prompts are chats, half raw text.
The top-2 gap of every step is recorded, so that a difference can be judged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

CHAT = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue in one paragraph.",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish, French and German.",
    "What is 17 times 23? Think step by step.",
    "Write a Python function that reverses a string.",
    "Give me a recipe for pancakes.",
    "Who wrote 'Pride and Prejudice', and when?",
    "Summarize the story of Cinderella in two sentences.",
)
RAW = (
    "Once upon a time, in a village at the foot of a mountain,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "In 1969, humans first",
    "Ingredients:\n- 2 cups flour\n- 1 cup sugar\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox",
    "SELECT name, age FROM users WHERE",
    "Photosynthesis is the process by which",
    "1, 1, 2, 3, 5, 8, 13,",
)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    folder, name = str(options.model.parent), options.model.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = load(options.model)
    records = []
    for kind, text in [*(("chat", text) for text in CHAT), *(("raw", text) for text in RAW)]:
        started = time.monotonic()
        record = continuation(model, prompt_ids(tokenizer, kind, text), options.tokens)
        records.append({"kind": kind, "text": text, **record})
        answer = tokenizer.decode(record["ids"])
        taken = time.monotonic() - started
        print(f"{kind:4} {taken:5.1f} s  {text[:40]!r} -> {answer[:60]!r}", flush=True)  # noqa: T201
    options.output.write_text(text_of(document(options.model, options.tokens), records))


def load(path: Path) -> torch.nn.Module:
    """transformers' model of a tied llama file without biases."""
    config = transformers.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).eval()
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        numbers = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        weights[hf_name(tensor.name)] = torch.from_numpy(unpermuted(tensor.name, numbers, config))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    return model


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    return f"{'model.layers.' + parts[1] + '.' if len(parts) == 3 else ''}{NAMES[parts[-1]]}.weight"


def unpermuted(name: str, rows: np.ndarray, config: transformers.PretrainedConfig) -> np.ndarray:
    """Query and key rows in halves: where the file has pairs (2i, 2i + 1), transformers has (i, i + D/2)."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return rows
    return rows.reshape(count, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def prompt_ids(tokenizer: transformers.PreTrainedTokenizerBase, kind: str, text: str) -> list[int]:
    if kind == "raw":
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def continuation(model: torch.nn.Module, prompt: list[int], count: int) -> dict[str, list]:
    """Greedy ids, end of text or not, and the gap between the two best logits at each step."""
    ids, gaps, cache = [], [], None
    step = torch.tensor([prompt])
    for _ in range(count):
        out = model(step, cache=cache, use_cache=True)
        cache = out.cache
        best = out.logits[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
        step = best.indices[:1][None]
    return {"prompt": prompt, "ids": ids, "gaps": gaps}


def text_of(head: dict, records: list[dict]) -> str:
    """JSON with one prompt per line."""
    lines = ",\n".join(json.dumps(record) for record in records)
    return json.dumps({**head, "prompts": []}, indent=1).replace("[]", f"[\n{lines}\n]") + "\n"


def document(path: Path, tokens: int) -> dict:
    return {
        "model": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager",
        "command": f"python tools/record_greedy.py {path.name} OUTPUT --tokens {tokens}",
    }


if __name__ == "__main__":
    main()
