"""All reference ops in one table; what `build_ops` starts from."""

from __future__ import annotations

from luce_core.ops import (
    attention,
    coarse,
    compressed,
    delta,
    fine,
    moe,
    newest,
    ngrams,
    pack,
    sampling,
    scores,
    state,
    streams,
)
from luce_core.ops.namespace import Layer

ENGINE: Layer = {
    "process_logits": sampling.process_logits,
    "sample": sampling.sample,
    "logprobs": sampling.logprobs,
    "prompt_logprobs": scores.prompt_logprobs,
    "newest_tokens": newest.newest_tokens,
    "note_picks": newest.note_picks,
}

REFERENCE: Layer = {
    **pack.OPS,
    **fine.OPS,
    **attention.OPS,
    **coarse.OPS,
    **moe.OPS,
    **delta.OPS,
    **compressed.OPS,
    **streams.OPS,
    **ngrams.OPS,
    **state.OPS,
    **ENGINE,
}
