"""A whole engine: greedy texts are Hugging Face's, beside others, from a cached prefix, with candidates."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from luce_core.contracts import SamplingParams
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, make_pipeline
from luce_core.testing.staging import AheadExecutor
from luce_core.testing.toy_vocab import toy_vocabulary

from .hugging_face import metadata_of, random_model, tensors_of

HOOKS = "luce_arch_qwen35.hooks"
NEXTN_HOOKS = "luce_core.testing.nextn_hooks"
OPTIONS = {"cache_type_k": "f32", "cache_type_v": "f32", "chunk": 32, "threads": 1}
LENGTH = 10


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe"])
def case(request, tmp_path_factory):
    """(file, three prompts, the first two with 70 tokens in common, Hugging Face's model)"""
    vocabulary = toy_vocabulary("bpe")
    size = len(vocabulary["tokenizer.ggml.tokens"])
    random = random_model(request.param, {"vocab_size": size})
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, {**metadata_of(random), **vocabulary}, tensors_of(random))
    draw = torch.Generator().manual_seed(8)
    common, *ends = (torch.randint(0, 250, (count,), generator=draw).tolist() for count in (70, 9, 14, 33))
    return path, [common + ends[0], common + ends[1], ends[2]], random.model


@torch.no_grad()
def assert_greedy(model, prompts, answers):
    """Behind every token of an answer, its next one is Hugging Face's best."""
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == LENGTH
        best = model(torch.tensor([prompt + answer])).logits[0].argmax(-1).tolist()
        assert answer == best[len(prompt) - 1 : -1]


def test_prompts_together_and_a_prefix_from_the_cache(case):
    path, prompts, model = case
    rig = EngineRig(make_pipeline(path, TOY_HOOKS, HOOKS, options=OPTIONS))
    answers = rig.generate(*prompts, max_tokens=LENGTH)
    assert_greedy(model, prompts, answers)
    again = [rig.submit(prompt, LENGTH) for prompt in prompts]
    rig.run()
    assert [answer.ids for answer in again] == answers
    # the state of a recurrence comes back only where a checkpoint was made
    assert all(answer.done.usage["cached_tokens"] > 0 for answer in again)


def test_steps_queued_ahead_leave_the_state_of_the_text(case):
    """Texts end by themselves with a step under way, and the next turn goes on from what they left."""
    path, prompts, model = case
    plain = EngineRig(make_pipeline(path, TOY_HOOKS, HOOKS, options=OPTIONS))
    want = plain.generate(*prompts, max_tokens=LENGTH)
    ends = [frozenset({answer[LENGTH - 3]}) for answer in want]
    executor = AheadExecutor()
    pipeline = make_pipeline(path, TOY_HOOKS, HOOKS, options=OPTIONS)
    rig = EngineRig(evolve(pipeline, executor=executor))
    answers = [rig.submit(prompt, LENGTH, eog=eog) for prompt, eog in zip(prompts, ends, strict=True)]
    rig.run()
    assert executor.followed > 3
    assert {answer.done.reason for answer in answers} == {"stop"}
    for answer, whole in zip(answers, want, strict=True):
        assert answer.ids == whole[: len(answer.ids)]
    longer = [prompt + answer.ids + [7] for prompt, answer in zip(prompts, answers, strict=True)]
    again = [rig.submit(prompt, LENGTH) for prompt in longer]
    rig.run()
    assert all(
        answer.done.usage["cached_tokens"] >= len(prompt) - 2
        for answer, prompt in zip(again, longer, strict=True)
    )
    assert_greedy(model, longer, [answer.ids for answer in again])


def test_candidates_are_taken_and_rolled_back(case):
    """Two chains behind the newest token, a wrong one and one that is right for two tokens."""
    path, prompts, model = case
    plain = EngineRig(make_pipeline(path, TOY_HOOKS, HOOKS, options=OPTIONS))
    want = plain.generate(*prompts, max_tokens=LENGTH)
    texts = [prompt + answer for prompt, answer in zip(prompts, want, strict=True)]

    def script(text, capacity):
        whole = next(known for known in texts if known[: len(text)] == list(text))
        right = whole[len(text) : len(text) + 2]
        if len(right) < 2 or capacity < 5:  # less room than this tree takes
            return [], []
        wrong = [(token + 1) % 250 for token in right]
        # in the order of the tree: parents are rows, the newest token is -1
        return [wrong[0], right[0], wrong[1], right[1], wrong[0]], [-1, -1, 0, 1, 3]

    drafter = ScriptedDrafter(script)
    rig = EngineRig(make_pipeline(path, TOY_HOOKS, HOOKS, options=OPTIONS, drafters=[drafter]))
    answers = [rig.submit(prompt, LENGTH) for prompt in prompts]
    rig.run()
    assert [answer.ids for answer in answers] == want
    assert_greedy(model, prompts, want)
    assert drafter.rounds > 0
    assert sum(answer.done.usage["accepted_tokens"] for answer in answers) >= 6


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_drafts_of_the_mtp_block_change_no_text(arch, tmp_path):
    """Greedy and sampled, with the state of the block beside that of the trunk, from a cached prefix too."""
    vocabulary = toy_vocabulary("bpe")
    random = random_model(arch, {"vocab_size": len(vocabulary["tokenizer.ggml.tokens"])})
    keys = {**metadata_of(random, nextn=True), **vocabulary}
    path = write_gguf(tmp_path / "m.gguf", keys, tensors_of(random, nextn=True))
    draw = torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, 250, (count,), generator=draw).tolist() for count in (1, 20, 45)]
    drafted_options = {**OPTIONS, "drafter": ("nextn-chain",), "draft_nodes": 3}
    plain = EngineRig(make_pipeline(path, TOY_HOOKS, HOOKS, options=OPTIONS))
    rig = EngineRig(make_pipeline(path, TOY_HOOKS, HOOKS, NEXTN_HOOKS, options=drafted_options))
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=5)):
        want = plain.generate(*prompts, max_tokens=LENGTH, params=params)
        assert rig.generate(*prompts, max_tokens=LENGTH, params=params) == want
        longer = [prompt + answer + [7] for prompt, answer in zip(prompts, want, strict=True)]
        again = plain.generate(*longer, max_tokens=LENGTH, params=params)
        assert rig.generate(*longer, max_tokens=LENGTH, params=params) == again
    drafter = rig.pipeline.drafters[0]
    assert drafter.rounds
    assert [pages.name for pages in rig.pipeline.target.backend.spec.layout.pages] == ["blk.3.kv", "blk.4.kv"]


@torch.no_grad()
def test_the_first_candidate_is_the_best_of_hugging_faces_block(tmp_path):
    """Behind prompts in one chunk, in several and restored from the cache; the final's way is bfloat16."""
    vocabulary = toy_vocabulary("bpe")
    random = random_model("qwen35", {"vocab_size": len(vocabulary["tokenizer.ggml.tokens"])})
    keys = {**metadata_of(random, nextn=True), **vocabulary}
    path = write_gguf(tmp_path / "m.gguf", keys, tensors_of(random, nextn=True))
    options = {**OPTIONS, "drafter": ("nextn-chain",), "draft_nodes": 1}
    rig = EngineRig(make_pipeline(path, TOY_HOOKS, HOOKS, NEXTN_HOOKS, options=options))
    drafter = rig.pipeline.drafters[0]
    proposed, propose = [], drafter.propose

    def watched(seen):
        tree = propose(seen)
        ends = zip(seen.slot.tolist(), seen.length.tolist(), strict=True)
        texts = [seen.history[slot, : length + 1].clone() for slot, length in ends]
        proposed.extend(zip(texts, tree.token[:, 0].tolist(), tree.count.tolist(), strict=True))
        return tree

    drafter.propose = watched
    draw = torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, 250, (count,), generator=draw).tolist() for count in (2, 20, 75)]
    rig.generate(*prompts, max_tokens=6)
    rig.generate(prompts[2], max_tokens=6)
    used = [(text, token) for text, token, count in proposed if count]
    assert len(used) > 12
    right = 0
    for text, token in used:
        ids = text.long()
        hidden = random.model.model(ids[None]).last_hidden_state[0]
        normed = random.mtp(random.model, ids, torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1])))
        right += int(random.model.lm_head(normed)[-1].argmax()) == token
    assert right >= len(used) - 1
