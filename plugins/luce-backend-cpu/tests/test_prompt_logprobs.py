"""Scored prompts through whole engines with every tier, against a plain f32 run of all rows at once."""

import pytest
import torch

from luce_core.contracts import PromptLogprobs
from luce_core.testing.dense import write_dense_model
from luce_core.testing.pipeline import EngineRig, make_pipeline
from luce_core.testing.rig import ModelRig

HOOKS = ("luce_core.testing.dense.hooks", "luce_backend_cpu.hooks")
PROMPT = [(7 * i * i + 3 * i) % 250 + 1 for i in range(60)]

EXACT_CACHE = {"ctx_size": 128, "cache_type_k": "f32", "cache_type_v": "f32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(file, log-probabilities of every row, by the reference ops)."""
    path = write_dense_model(tmp_path_factory.mktemp("dense") / "dense.gguf", quant="Q8_0")
    return path, ModelRig(path, HOOKS[0]).fresh(PROMPT).log_softmax(-1)


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"cpu.tier": "c"}, 5e-2),
        ({"cpu.tier": "c", "deterministic": True}, 1e-3),
        ({"cpu.tier": "torch"}, 5e-2),
        ({"cpu.exact": True}, 1e-4),
    ],
    ids=["c", "rows", "torch", "exact"],
)
def test_every_tier_scores_a_prompt_as_the_reference_does(model, options, tolerance, chunk):
    path, law = model
    rig = EngineRig(make_pipeline(path, *HOOKS, options={**EXACT_CACHE, **options, "chunk": chunk}))
    answer = rig.submit(PROMPT, 2, prompt_logprobs=3)
    mate = rig.submit(PROMPT[:20], 4)
    rig.run()
    assert (answer.done.error, mate.done.error) == (None, None)
    entries = [e for event in answer.events if isinstance(event, PromptLogprobs) for e in event.tokens]
    assert [entry.token for entry in entries] == PROMPT[1:]
    got = torch.tensor([entry.logprob for entry in entries])
    want = law[torch.arange(59), torch.tensor(PROMPT[1:])]
    assert float((got - want).abs().max()) <= tolerance
    best = torch.tensor([[value for _, value in entry.top] for entry in entries])
    assert float((best - law[:59].topk(3).values).abs().max()) <= tolerance
