"""A whole engine with images: logits and greedy texts are Hugging Face's, whatever happens on the way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from luce_arch_qwen35.images import ImageProcessor

from luce_core.contracts import Commit
from luce_core.engine.media import SequenceMedia
from luce_core.errors import ModelFormatError
from luce_core.media import place
from luce_core.model.batch import make_batch
from luce_core.plan_media import media_processor
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, make_pipeline, make_test_plan, registry_of
from luce_core.testing.rig import ModelRig

from .hugging_face import metadata_of, tensors_of
from .test_vision import encoder_of, rows_of
from .vision import files_of, picture, projector, seeing_model, vocabulary, whole_logits

HOOKS = "luce_arch_qwen35.hooks"
LENGTH = 8
TOLERANCE = 3e-4
"""Of a log-probability. Measured: up to 8e-5."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("model"))


def engine_of(files, drafters=(), **options):
    options = {**files.options, **options}
    return EngineRig(make_pipeline(files.text, TOY_HOOKS, HOOKS, options=options, drafters=drafters))


def ids_of(count, seed):
    return torch.randint(0, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompt_of(rig, files, *parts):
    """parts: numbers of text tokens, and images."""
    plan = rig.pipeline.plan
    processor = media_processor(plan, registry_of(TOY_HOOKS, HOOKS))
    assert isinstance(processor, ImageProcessor)
    ids, media = [], []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids += ids_of(part, number)
        else:
            media.append(processor.prepare(np.asarray(part)))
            ids += [files.start, files.pad, files.end]
    return place(ids, files.pad, media)


def submitted(rig, placed, length=LENGTH, **more):
    return rig.submit(placed.ids, length, media=placed.media, keys=placed.keys, **more)


def answered(rig, placed, length=LENGTH, **more):
    answer = submitted(rig, placed, length, **more)
    rig.run()
    assert answer.done.error is None, answer.done.error
    return answer


def assert_greedy(files, placed, answer, images):
    """Behind every token of an answer, its next one is Hugging Face's best."""
    assert len(answer) > 0
    best = whole_logits(files.model, [*placed.ids, *answer], images).argmax(-1).tolist()
    assert answer == best[len(placed.ids) - 1 : -1]


A, B, C = picture(256, 256, 1), picture(256, 256, 2), picture(128, 390, 3)
CASES = {
    "one in the middle": (10, A, 12),
    "first of all": (0, C, 20),
    "two side by side": (5, A, 0, C, 9),
    "three, two of them the same": (5, A, 3, B, 4, A, 30),
    "a long text behind": (3, C, 90),
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_that_of_hugging_face(name, files):
    parts = CASES[name]
    images = [part for part in parts if not isinstance(part, int)]
    rig = engine_of(files)
    placed = prompt_of(rig, files, *parts)
    answer = answered(rig, placed, prompt_logprobs=1)
    logits = whole_logits(files.model, placed.ids, images).log_softmax(-1)
    want = logits[:-1].gather(1, torch.tensor(placed.ids[1:])[:, None])[:, 0]
    got = [entry.logprob for event in answer.events for entry in getattr(event, "tokens", ())]
    assert float((torch.tensor(got) - want).abs().max()) < TOLERANCE
    assert_greedy(files, placed, answer.ids, images)


def test_positions_matter(files):
    """Otherwise the test above would show little."""
    rig = engine_of(files)
    placed = prompt_of(rig, files, 10, A, 40)
    want = whole_logits(files.model, placed.ids, [A])
    ids = torch.tensor([placed.ids])
    with torch.no_grad():
        embeds = files.model.whole.model.get_input_embeddings()(ids)
        flat = files.model.whole(
            inputs_embeds=embeds, position_ids=torch.arange(len(placed.ids))[None, None].expand(3, 1, -1)
        )
    assert float((flat.logits[0] - want)[-1].abs().max()) > 0.05


@pytest.mark.parametrize("arch", ["qwen35moe"])
def test_with_experts(arch, tmp_path):
    files = files_of(tmp_path, arch)
    rig = engine_of(files)
    placed = prompt_of(rig, files, 6, C, 11)
    assert_greedy(files, placed, answered(rig, placed).ids, [C])


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_chunks_cut_images_anywhere(chunk, files):
    rig = engine_of(files, chunk=chunk)
    placed = prompt_of(rig, files, 5, A, 0, C, 9)
    assert_greedy(files, placed, answered(rig, placed).ids, [A, C])


def test_beside_others(files):
    rig = engine_of(files)
    prompts = [prompt_of(rig, files, *parts) for parts in CASES.values()]
    plain = rig.submit(ids_of(40, 9), LENGTH)
    answers = [submitted(rig, placed) for placed in prompts]
    rig.run()
    assert plain.ids == engine_of(files).generate(ids_of(40, 9), max_tokens=LENGTH)[0]
    for placed, answer, parts in zip(prompts, answers, CASES.values(), strict=True):
        assert_greedy(files, placed, answer.ids, [part for part in parts if not isinstance(part, int)])


# --- the prefix cache


def test_equal_images_are_found_and_not_encoded_again(files):
    rig = engine_of(files)
    first = answered(rig, prompt_of(rig, files, 10, A, 12))
    assert rig.engine.encoding.encoded == 1
    again = answered(rig, prompt_of(rig, files, 10, A.copy(), 12))
    assert again.ids == first.ids
    assert again.done.usage["cached_tokens"] == again.done.usage["prompt_tokens"] - 1
    assert rig.engine.encoding.encoded == 1


def test_images_of_the_same_size_are_not_taken_for_each_other(files):
    rig = engine_of(files)
    other, placed = prompt_of(rig, files, 10, A, 12), prompt_of(rig, files, 10, B, 12)
    assert other.ids == placed.ids
    first, second = answered(rig, other), answered(rig, placed)
    assert second.done.usage["cached_tokens"] == 0
    assert rig.engine.encoding.encoded == 2
    assert_greedy(files, other, first.ids, [A])
    assert_greedy(files, placed, second.ids, [B])


def test_one_bit_of_one_pixel_is_another_image(files):
    rig = engine_of(files)
    changed = np.asarray(A).copy()
    changed[200, 100, 1] ^= 1
    answered(rig, prompt_of(rig, files, 10, A, 12))
    assert answered(rig, prompt_of(rig, files, 10, changed, 12)).done.usage["cached_tokens"] == 0


def test_a_conversation_goes_on_behind_an_image(files):
    """The next turn finds all of the last, and its own image alone is encoded."""
    rig = engine_of(files)
    placed = prompt_of(rig, files, 10, A, 12)
    first = answered(rig, placed)
    longer = prompt_of(rig, files, 4, C, 7)
    shift = len(placed.ids) + len(first.ids)
    from attrs import evolve

    whole = evolve(
        longer,
        ids=(*placed.ids, *first.ids, *longer.ids),
        keys=(*placed.keys, *first.ids, *longer.keys),
        media=(*placed.media, *(evolve(span, first=span.first + shift) for span in longer.media)),
    )
    second = answered(rig, whole)
    assert second.done.usage["cached_turn"] == 1
    assert rig.engine.encoding.encoded == 2
    assert_greedy(files, whole, second.ids, [A, C])


def test_two_requests_with_one_image_encode_it_once(files):
    rig = engine_of(files)
    prompts = [prompt_of(rig, files, count, A, 12) for count in (3, 9, 10)]
    answers = [submitted(rig, placed) for placed in prompts]
    rig.run()
    assert rig.engine.encoding.encoded == 1
    for placed, answer in zip(prompts, answers, strict=True):
        assert_greedy(files, placed, answer.ids, [A])


# --- giving way and coming back


@pytest.mark.parametrize("options", [{}, {"checkpoint_bytes": 0}, {"swap_bytes": 2**26}])
@pytest.mark.parametrize("steps", [3, 5, 16])
def test_after_a_preemption_the_text_is_the_same(steps, options, files):
    """In the middle of the image, behind it, and while it answers; with and without what was computed."""
    rig = engine_of(files, **options)
    placed = prompt_of(rig, files, 10, A, 60)
    answer = submitted(rig, placed, 12)
    while not rig.engine.running:
        rig.engine.step()
    for _ in range(steps):
        rig.engine.step()
    (seq,) = rig.engine.running
    rig.engine._preempt(seq)
    rig.run()
    assert rig.engine.counters["preempted"] == 1
    assert_greedy(files, placed, answer.ids, [A])
    assert len(answer.ids) == 12


def test_candidates_behind_an_image(files):
    plain = engine_of(files)
    placed = prompt_of(plain, files, 10, A, 12)
    want = answered(plain, placed, 12).ids
    whole = [*placed.ids, *want]

    def script(text, capacity):
        right = whole[len(text) : len(text) + 2]
        if len(right) < 2 or capacity < 5:
            return [], []
        wrong = [(token + 1) % 250 for token in right]
        return [wrong[0], right[0], wrong[1], right[1], wrong[0]], [-1, -1, 0, 1, 3]

    drafter = ScriptedDrafter(script)
    rig = engine_of(files, drafters=[drafter])
    answer = answered(rig, placed, 12)
    assert answer.ids == want
    assert answer.done.usage["accepted_tokens"] >= 6


# --- files that do not go together


def test_a_projector_of_another_model_is_one_error_that_names_it(files, tmp_path):
    other = projector(tmp_path / "other.gguf", seeing_model(hidden_size=64))
    with pytest.raises(ModelFormatError, match=r"other\.gguf.*rows of 64 numbers, the model takes 48"):
        make_test_plan(files.text, TOY_HOOKS, HOOKS, options={**files.options, "mmproj": str(other)})


def test_a_model_without_the_token_of_images(tmp_path):
    from luce_core.testing.toy_vocab import toy_vocabulary

    words = toy_vocabulary("bpe")
    model = seeing_model(vocab_size=len(words["tokenizer.ggml.tokens"]))
    text = write_gguf(tmp_path / "t.gguf", {**metadata_of(model.text), **words}, tensors_of(model.text))
    given = {"mmproj": str(projector(tmp_path / "p.gguf", model))}
    with pytest.raises(ModelFormatError, match=r"p\.gguf.*has no token '<\|image_pad\|>'"):
        make_test_plan(text, TOY_HOOKS, HOOKS, options=given)


@pytest.mark.parametrize(("metadata", "said"), [
    ({"clip.projector_type": "gemma3"}, r"mmproj\.gguf.*'clip\.gemma3' model, which nothing here"),
    ({"clip.vision.is_deepstack_layers": [True, False, False]}, r"mmproj\.gguf.*Qwen3-VL"),
])  # fmt: skip
def test_projectors_of_other_families(metadata, said, files, tmp_path):
    path = projector(tmp_path / "mmproj.gguf", files.model, metadata=metadata)
    with pytest.raises(ModelFormatError, match=said):
        make_test_plan(files.text, TOY_HOOKS, HOOKS, options={"mmproj": str(path)})


def test_a_language_model_is_no_projector_and_the_other_way_round(files):
    from luce_core.errors import PlanError

    with pytest.raises(ModelFormatError, match="holds a language model"):
        make_test_plan(files.text, TOY_HOOKS, HOOKS, options={"mmproj": str(files.text)})
    with pytest.raises(PlanError, match="--mmproj"):
        make_test_plan(files.projector, TOY_HOOKS, HOOKS)
    assert vocabulary()


def test_the_plan_has_the_encoder_and_what_it_takes(files):
    plan = make_test_plan(files.text, TOY_HOOKS, HOOKS, options=files.options)
    assert plan.parts["encoder"] == ("qwen3vl",)
    claims = {claim.owner: claim.num_bytes for claim in plan.claims}
    assert claims["weights of mmproj"] > 0
    assert claims["images through mmproj"] > 2**27
    larger = make_test_plan(
        files.text, TOY_HOOKS, HOOKS, options={**files.options, "image_max_pixels": 2**20}
    )
    assert {c.owner: c.num_bytes for c in larger.claims}["images through mmproj"] > claims[
        "images through mmproj"
    ]


def test_forks_behind_an_image_go_their_own_ways(files):
    """Two sequences share a prompt with an image and are continued with different tokens, in turn."""
    placed = prompt_of(engine_of(files), files, 10, A, 12)
    media = SequenceMedia(placed.media, len(placed.ids), 3)
    rig = ModelRig(files.text, HOOKS)
    (span,) = placed.media
    media.put(0, rows_of(encoder_of((files.text, files.projector)), span.media))
    first = rig.open()
    rig.blocks.reserve(first, len(placed.ids))
    places, rows = media.positions(0, len(placed.ids)), media.rows(0, len(placed.ids))
    batch = make_batch("prefill", [rig._rows(first, placed.ids, positions=places, embeds=rows)], axes=3)
    rig.backend.forward(batch)
    rig.blocks.advance(first, placed.keys)
    texts = {first: [5, 6, 7], rig.blocks.fork(first): [8, 9, 10]}
    for step in range(3):
        for seq, tokens in texts.items():
            length = rig.blocks.length(seq)
            places = media.held_positions(length, [-1])
            held = make_batch("held", [rig._rows(seq, [tokens[step]], positions=places)], axes=3)
            logits = rig.backend.forward(held).logits[0]
            rig.backend.commit(
                held, Commit(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
            )
            rig.blocks.advance(seq, [tokens[step]])
            want = whole_logits(files.model, [*placed.ids, *tokens[: step + 1]], [A])[-1]
            assert float((logits - want).abs().max()) <= 1e-4 * float(want.abs().max())
    rig.close_all(list(texts))
