"""V4.1 in a whole engine: the tokens of plain decoding, whatever is batched, cached, preempted or drafted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve

from luce_core.contracts import Tap
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, make_pipeline
from luce_core.testing.rig import ModelRig
from luce_core.testing.staging import AheadExecutor
from luce_core.testing.toy_vocab import toy_vocabulary

from .models_v41 import keys_of, metadata_of, random_tensors

HOOKS = "luce_arch_deepseek4.hooks"
VOCABULARY = toy_vocabulary()
VOCAB = len(VOCABULARY["tokenizer.ggml.tokens"])
START = [5, 9, 33, 120, 7, 64, 81, 3, 3, 9, 33, 120, 41, 17, 200, 61, 90]
PROMPTS = [START, [*START, 11, 12], [44, 2, 91], [*START[:9], 1, 2, 3, 4, 5, 6, 7, 8]]
TOKENS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    keys = keys_of("whole") | {
        "vocab_size": VOCAB,
        "engram.token_map": np.array([token * 5 % 37 for token in range(VOCAB)], np.int32),
    }
    path = tmp_path_factory.mktemp("v41") / "whole.gguf"
    return write_gguf(path, {**metadata_of(keys), **VOCABULARY}, random_tensors(keys))


@pytest.fixture(scope="module")
def wanted(model):
    """Greedy, one by one, without an engine."""
    torch.set_num_threads(1)
    rig, found = ModelRig(model, HOOKS), []
    for prompt in PROMPTS:
        seq, answer = rig.open(), []
        rig.prefill({seq: prompt[:-1]})
        for _ in range(TOKENS):
            answer.append(int(rig.decode(seq, answer[-1] if answer else prompt[-1]).argmax()))
        found.append(answer)
    return found


def rig_of(model, drafters=(), **options):
    torch.set_num_threads(1)
    plain = {"cache_type_k": "f32", "cache_type_v": "f32", "ctx_size": 40, "cache_block": 8, "threads": 1}
    return EngineRig(make_pipeline(model, TOY_HOOKS, HOOKS, options=plain | options, drafters=drafters))


@pytest.mark.parametrize("chunk", [5, 64])
def test_prompts_together_and_again_from_the_cache(model, wanted, chunk):
    rig = rig_of(model, chunk=chunk)
    for _ in range(2):
        assert rig.generate(*PROMPTS, max_tokens=TOKENS) == wanted
    assert rig.engine.blocks.stats().hit_tokens > 0


def test_drafted_trees_change_nothing(model, wanted):
    """A right branch beside a wrong one, in turns; taps of every stream, and of what the head gets."""
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, wanted, strict=True)}

    def script(text, capacity):
        known = next(p for p in sorted(answers, key=len, reverse=True) if tuple(text[: len(p)]) == p)
        rest = answers[known][len(text) - len(known) :][:2]
        if len(text) % 3 == 0 or len(rest) < 2:
            return [1, 2][:capacity], [-1, 0][:capacity]
        tokens, parents = [rest[0] ^ 1, rest[0], rest[1], rest[1] ^ 1], [-1, -1, 1, 1]
        return tokens[:capacity], parents[:capacity]

    taps = (Tap("residual", 6), Tap("final", 6))
    drafter = ScriptedDrafter(script, taps=taps)
    rig = rig_of(model, [drafter])
    assert rig.generate(*PROMPTS, max_tokens=TOKENS) == wanted
    assert drafter.rounds > 0
    assert {tap.shape[1] for tap in drafter.tapped[0::2]} == {4 * 32}
    assert {tap.shape[1] for tap in drafter.tapped[1::2]} == {32}


def test_sequences_that_give_way_go_on_as_if_nothing_had_been(model, wanted):
    """Too little memory for all four: the younger are put off, and come back within pairs and n-grams."""
    state = rig_of(model).pipeline.state
    windows = state.sizes.num_blocks["target/near"] * state.block_bytes["target/near"]
    entry_blocks = 9 * sum(state.block_bytes[f"target/every.{stride}"] for stride in (1, 2))
    rig = rig_of(model, cache_bytes=windows + entry_blocks)
    assert rig.generate(*PROMPTS, max_tokens=TOKENS) == wanted
    assert rig.engine.counters["preempted"] > 0


def test_steps_queued_ahead_leave_the_state_of_the_text(model, wanted):
    """Texts end by themselves with a step under way, and the next turn goes on from what they left."""
    made, plain, executor = rig_of(model), rig_of(model), AheadExecutor()
    made = EngineRig(evolve(made.pipeline, executor=executor))
    turns = []
    for rig in (made, plain):
        answers = [
            rig.submit(prompt, TOKENS, eog=frozenset({answer[6]}))
            for prompt, answer in zip(PROMPTS, wanted, strict=True)
        ]
        rig.run()
        longer = [[*prompt, *answer.ids, 7] for prompt, answer in zip(PROMPTS, answers, strict=True)]
        turns.append((longer, rig.generate(*longer, max_tokens=5)))
    assert turns[0] == turns[1]
    assert executor.followed > 3
