"""Small random V4.1 models, a feature at a time, and the files converters would make of them."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np
from luce_arch_deepseek4.v41_geometries import shapes_of

from luce_core.testing.gguf_factory import write_gguf

from .oracle_v41 import primes_above

ARCH = "deepseek41"
BASE = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 32,
    "vocab_size": 61,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.q_lora_rank": 24,
    "attention.sliding_window": 6,
    "attention.compress_ratios": [0, 0, 0],
    "attention.compress_rope_freq_base": 16e4,
    "attention.layer_norm_rms_epsilon": 1e-20,
    "attention.output_group_count": 2,
    "attention.output_lora_rank": 12,
    "attention.indexer.head_count": 16,
    "attention.indexer.key_length": 16,
    "attention.indexer.top_k": 3,
    "rope.dimension_count": 8,
    "rope.freq_base": 1e4,
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 20,
    "hyper_connection.epsilon": 1e-6,
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 16,
    "expert_gating_func": 4,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "swiglu_clamp_exp": [0.5] * 3,
}
CANDIDATES = {
    "attention.indexer.candidate_top_k": 3,
    "attention.indexer.candidate_block_size": 4,
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}


def streams(ratios, sources, indexers=(), candidates=-1, **more):
    """Layers of these ratios. sources compress what they and later ones read, and pick; indexers pick."""
    return {
        "block_count": len(ratios),
        "attention.compress_ratios": list(ratios),
        "swiglu_clamp_exp": [0.5] * len(ratios),
        "attention.indexer.candidate_source_layer": candidates,
        "sources": sources,
        "indexers": (*sources, *indexers),
        **more,
    }


def engram(layers, size=4, heads=2, width=8, above=20):
    """Keys of n-gram tables in these layers; their row totals follow."""
    buckets = (size - 1) * heads
    primes = primes_above(above, buckets * len(layers))
    offsets = []
    for place in range(len(layers)):
        own = primes[place * buckets : (place + 1) * buckets]
        offsets += np.cumsum([0, *own[:-1]]).tolist()
    multipliers = np.random.default_rng(3).integers(0, 2**45, size * len(layers)) * 2 + 1
    return {
        "engram.layer_ids": list(layers),
        "engram.head_count": heads,
        "engram.key_length": width,
        "engram.max_ngram_size": size,
        "engram.pad_id": 2,
        "engram.multipliers": multipliers.astype(np.uint64),
        "engram.primes": np.array(primes, np.uint64),
        "engram.offsets": np.array(offsets, np.uint64),
        "engram.token_map": np.array([token * 5 % 37 for token in range(61)], np.int32),
    }


WHOLE = {
    **streams([0, 2, 2, 2, 1, 1, 1], (1, 3, 4), (6,), 4, **CANDIDATES, **YARN),
    **engram([1, 3]),
}
"""Everything, in the order of the published model: two shared streams of pairs, one of single tokens."""
CASES = {
    "a window alone": {},
    "a window of one": {"attention.sliding_window": 1},
    "pairs": streams([0, 2, 2], (1,)),
    "single tokens": streams([0, 1, 1], (1,)),
    "groups of three": streams([3, 3, 0], (0,)),
    "two streams after each other": streams([2, 2, 2, 2], (0, 2)),
    "pairs, then single tokens": streams([2, 2, 1, 1], (0, 2)),
    "picked again for the same stream": streams([2, 2, 2, 2], (0,), (2,)),
    "more picked than there are": streams([2, 1, 1], (0, 1), **{"attention.indexer.top_k": 100}),
    "candidates": streams([0, 1, 1, 1], (1,), (2,), 1, **CANDIDATES),
    "candidates of pairs, kept over a layer": streams([2, 2, 2], (0,), (2,), 0, **CANDIDATES),
    "fewer candidates than are picked": streams(
        [1, 1, 1], (0,), (1,), 0, **CANDIDATES, **{"attention.indexer.top_k": 20}
    ),
    "more candidates than blocks": streams(
        [1, 1], (0,), (1,), 0, **CANDIDATES | {"attention.indexer.candidate_top_k": 50}
    ),
    "yarn": streams([0, 2, 1], (1, 2), **YARN),
    "n-grams": engram([1]),
    "n-grams before the first layer": engram([0]),
    "pairs of tokens alone": engram([0, 2], size=2, heads=3),
    "wide rows": engram([1], width=32),
    "two streams of the residual": {
        **engram([1]),
        "hyper_connection.count": 2,
        "hyper_connection.sinkhorn_iterations": 3,
    },
    "one stream of the residual": {**engram([1]), "hyper_connection.count": 1},
    "one group of heads": {"attention.output_group_count": 1, "attention.head_count": 3},
    "no limits": {"swiglu_clamp_exp": [0.0] * 3},
    "whole": WHOLE,
}
STORED = {
    **WHOLE,
    **engram([1, 3], width=32),
    "attention.q_lora_rank": 32,
    "attention.output_lora_rank": 16,
    "expert_feed_forward_length": 32,
}
"""Of the file in `fixtures`: whole blocks in every row."""
LENGTH = 60
"""Tokens of a text."""


def keys_of(name):
    return {**BASE, **CASES[name]}


def text_of(length=LENGTH, seed=1):
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], length).tolist()


def tensors_of(keys):
    """Shapes of every tensor of such a file."""
    return shapes_of(keys, keys.get("sources", ()), keys.get("indexers", ()))


def random_tensors(keys, seed=10):
    """f32 numbers for every tensor, norms and scalars included; of a tensor always the same."""
    return {name: _numbers(seed, name, shape) for name, shape in tensors_of(keys).items()}


def _numbers(seed, name, shape):
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if "norm" in name or name.endswith(("engram_q.weight", "engram_k.weight")):
        noise = 1 + 0.3 * noise
    elif name.endswith("scale.weight"):
        noise = 1 + 0.2 * noise
    elif "embd" not in name and len(shape) >= 2:
        noise = noise * 1.2 / shape[-1] ** 0.5
    elif len(shape) == 1:  # sinks, the router's bias, the base of streams
        noise = 0.5 * noise
    return noise.astype(np.float32)


def model_of(name, **more):
    """(keys, tensors) of a case."""
    keys = {**keys_of(name), **more}
    return keys, random_tensors(keys)


def metadata_of(keys):
    """As a file has them. What only the factory knows is left out."""
    own = {key: value for key, value in keys.items() if key not in ("sources", "indexers")}
    source = own.get("attention.indexer.candidate_source_layer")
    if source is not None:
        own["attention.indexer.candidate_source_layer"] = np.int32(source)
    return {"general.architecture": ARCH, **{f"{ARCH}.{key}": value for key, value in own.items()}}


def written(path, keys, tensors, **more):
    return write_gguf(path, metadata_of(keys), tensors, **more)


def quant_of(name, shape):
    """What the stored file keeps a tensor as: about as converters do."""
    if (
        len(shape) < 2
        or "hc_" in name
        or name.endswith(("gate_inp.weight", "engram_q.weight", "engram_k.weight"))
    ):
        return "F32"
    if "_exps" in name:
        return "MXFP4"
    return "BF16" if "indexer.proj" in name else "Q8_0"


def digest(tensors):
    """Of names and numbers: whether a generator of random numbers still gives the recorded model."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(np.ascontiguousarray(tensors[name]).tobytes())
    return found.hexdigest()[:16]
