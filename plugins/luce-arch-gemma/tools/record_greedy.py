"""Record what Hugging Face transformers answers greedily, as the reference of `tests/test_greedy.py`.

    python tools/record_greedy.py MODEL.gguf tests/fixtures/greedy-gemma3-270m-q4_k_m.json

The model is transformers' Gemma3ForCausalLM in float32 on weights that the gguf package dequantized from the
same file; the tokenizer is transformers' too. Nothing of luce-core takes part. The published 270M file is of
the base model and brings no chat template, so chats are written in Gemma's turns by hand; half of the
prompts are chats, half raw text, and one is longer than the window.
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
    "What is the capital of Norway?",
    "Write a short poem about rain.",
    "Why do leaves turn yellow in autumn?",
    "List three animals that live in the desert.",
    "Translate 'thank you' into Italian, Dutch and Japanese.",
    "What is 12 times 12?",
    "Write a Python function that counts the words of a text.",
    "How do I cook rice?",
    "Who painted the Mona Lisa?",
    "Tell me a story about a fox in one paragraph.",
)
RAW = (
    "It was late in the evening when the train",
    "Water boils at",
    "#include <stdio.h>\n\nint main(void) {\n",
    "The largest planet of the solar system is",
    "Tomato soup\n\n1. Cut the tomatoes.\n2.",
    "La capitale de l'Italie est",
    "To be, or not to be,",
    "import numpy as np\n\ndef mean(values):\n",
    "2, 4, 8, 16, 32,",
    "".join(f"Chapter {n}. The {n}th day was longer than the one before. " for n in range(1, 51)),
)

SHORT = 64
"""Prompts of up to so many tokens run together: the weights are read once for all."""


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        str(options.model.parent), gguf_file=options.model.name
    )
    model = load(options.model)
    asked = [*(("chat", text) for text in CHAT), *(("raw", text) for text in RAW)]
    prompts = [prompt_ids(tokenizer, kind, text) for kind, text in asked]
    records: list[dict] = [{} for _ in prompts]
    for numbers in ([n for n, p in enumerate(prompts) if (len(p) > SHORT) == long] for long in (False, True)):
        started = time.monotonic()
        answers = continuations(model, [prompts[n] for n in numbers], options.tokens)
        print(f"{len(numbers)} prompts, {time.monotonic() - started:.0f} s", flush=True)  # noqa: T201
        for n, answer in zip(numbers, answers, strict=True):
            kind, text = asked[n]
            records[n] = {"kind": kind, "text": text, "prompt": prompts[n], **answer}
            print(f"{kind:4} {text[:40]!r} -> {tokenizer.decode(answer['ids'])[:60]!r}")  # noqa: T201
    options.output.write_text(text_of(document(options.model, options.tokens), records))


def load(path: Path) -> torch.nn.Module:
    """transformers' model of a gemma3 file, whose norm weights have the one added that transformers adds."""
    reader = gguf.GGUFReader(path)
    model = transformers.Gemma3ForCausalLM(config_of(reader)).eval()
    weights = {}
    for tensor in reader.tensors:
        numbers = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        name = hf_name(tensor.name)
        weights[name] = torch.from_numpy(numbers - 1 if "norm" in name else numbers)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    return model


def config_of(reader: gguf.GGUFReader) -> transformers.Gemma3TextConfig:
    def key(name: str) -> float:
        return reader.fields[f"gemma3.{name}"].contents()

    return transformers.Gemma3TextConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].contents()),
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"),
        num_attention_heads=key("attention.head_count"),
        num_key_value_heads=key("attention.head_count_kv"),
        head_dim=key("attention.key_length"),
        query_pre_attn_scalar=key("attention.key_length"),
        sliding_window=key("attention.sliding_window"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=key("context_length"),
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": key("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        attn_implementation="eager",
    )


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def hf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    return f"{'model.layers.' + parts[1] + '.' if len(parts) == 3 else ''}{NAMES[parts[-1]]}.weight"


def prompt_ids(tokenizer: transformers.PreTrainedTokenizerBase, kind: str, text: str) -> list[int]:
    if kind == "chat":
        text = f"<start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n"
    return [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]


@torch.no_grad()
def continuations(model: torch.nn.Module, prompts: list[list[int]], count: int) -> list[dict[str, list]]:
    """Greedy ids, end of text or not, and the gap between the two best logits at each step. The prompts run
    beside each other, filled up on the left, where nothing is attended to.
    """
    longest = max(map(len, prompts))
    step = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    position = (mask.cumsum(1) - 1).clamp(min=0)
    ids, gaps, cache = [], [], None
    for _ in range(count):
        out = model(
            step, attention_mask=mask, position_ids=position, cache=cache, use_cache=True, logits_to_keep=1
        )
        cache = out.cache
        best = out.logits[:, -1].topk(2)
        step, position = best.indices[:, :1], position[:, -1:] + 1
        mask = torch.cat((mask, torch.ones_like(step)), 1)
        ids.append(best.indices[:, 0])
        gaps.append(best.values[:, 0] - best.values[:, 1])
    return [
        {"ids": own.tolist(), "gaps": [round(gap, 6) for gap in differences.tolist()]}
        for own, differences in zip(torch.stack(ids, 1), torch.stack(gaps, 1), strict=True)
    ]


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
