"""Images for DeepSeek, borrowed from Qwen's encoder: what is paired and what is refused; a real server that
answers the official client as the float64 oracles do, given the same rows.
"""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from attrs import frozen

from luce_core.compose_chat import compose_chat
from luce_core.errors import ModelFormatError
from luce_core.gguf import read_header
from luce_core.media import ImageReader
from luce_core.plan_media import media_processor
from luce_core.testing.encoder_contract import EncoderContract, Pair
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.pipeline import TOY_HOOKS, make_pipeline, make_test_plan, registry_of
from luce_core.testing.server import serving
from luce_core.testing.toy_vocab import toy_vocabulary
from luce_core.text import ChatTemplate
from luce_core.text.vocabulary import TokenType

from .hugging_face import ALL, NEAR, SELECTED, metadata_of, random_model, tensors_of
from .models_v41 import keys_of, random_tensors
from .models_v41 import metadata_of as metadata_v41
from .oracle_v4 import OracleV4
from .oracle_v41 import Oracle
from .tower import UNIT, picture, png, write_tower

pytest.importorskip("luce_arch_qwen35", reason="whose encoder is borrowed")
HOOKS, QWEN = "luce_arch_deepseek4.hooks", "luce_arch_qwen35.hooks"
SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
IMAGE = "<｜place▁holder▁no▁0｜>"
FILE = Path(__file__).parent / "fixtures" / "tiny-deepseek4.gguf"
PIXELS = 8 * UNIT * UNIT
LENGTH = 3
SIZE = (2 * UNIT, 4 * UNIT)
A, B = picture(*SIZE, 1), picture(*SIZE, 2)
ROWS = 8


def vocabulary(*, image=IMAGE, kind=TokenType.CONTROL, template=False):
    """The toy's with DeepSeek's markers. template: the published one, else none."""
    found = toy_vocabulary("bpe")
    del found["tokenizer.chat_template"]
    if template:
        found["tokenizer.chat_template"] = read_header(FILE).metadata["tokenizer.chat_template"]
    more = [*SPECIAL, *([image] if image else [])]
    types = [int(TokenType.CONTROL)] * len(SPECIAL) + [int(kind)] * (len(more) - len(SPECIAL))
    found["tokenizer.ggml.tokens"] = [*found["tokenizer.ggml.tokens"], *more]
    found["tokenizer.ggml.token_type"] = [*found["tokenizer.ggml.token_type"], *types]
    return found


def v4_parts(vocab):
    layers = {"layer_types": [NEAR, SELECTED, ALL], "num_hidden_layers": 3, "num_hash_layers": 1}
    config, model = random_model({**layers, "vocab_size": vocab})
    metadata = metadata_of(config)
    keys = {key.removeprefix("deepseek4."): value for key, value in metadata.items()}
    return OracleV4, keys, metadata, tensors_of(model)


def v41_parts(vocab):
    ids = np.array([token * 5 % 37 for token in range(vocab)], np.int32)
    keys = keys_of("whole") | {"vocab_size": vocab, "engram.token_map": ids}
    return Oracle, keys, metadata_v41(keys), random_tensors(keys)


PARTS = {"v4": v4_parts, "v4.1": v41_parts}


@frozen(eq=False)
class Model:
    text: object
    projector: object
    oracle: Oracle

    @property
    def options(self):
        plain = {"cache_type_k": "f32", "cache_type_v": "f32", "chunk": 12, "cache_block": 8, "threads": 1}
        return {**plain, "mmproj": str(self.projector), "image_max_pixels": PIXELS}


def model_of(folder, name, **vocabulary_options):
    words = vocabulary(**vocabulary_options)
    kind, keys, metadata, tensors = PARTS[name](len(words["tokenizer.ggml.tokens"]))
    noise = np.random.default_rng(11)
    for layer in range(1, keys["block_count"]):
        bias = noise.standard_normal(keys["expert_count"]).astype(np.float32)
        tensors[f"blk.{layer}.exp_probs_b_vl.bias"] = bias
    text = write_gguf(folder / "text.gguf", {**metadata, **words}, tensors)
    tower = write_tower(folder / "mmproj.gguf", keys["embedding_length"])
    return Model(text, tower, kind(keys, tensors))


# --- pairs


class TestPair(EncoderContract):
    hooks, more_hooks = QWEN, (HOOKS,)

    def make_files(self, folder):
        model = model_of(folder, "v4")
        return Pair(model.text, model.projector)

    def make_wrong(self, folder):
        return write_tower(folder / "wrong.gguf", 24)


def plan_of(model, *hooks):
    return make_test_plan(model.text, TOY_HOOKS, *hooks, options=model.options)


def test_the_plan_says_that_it_is_experimental(tmp_path):
    model = model_of(tmp_path, "v4.1")
    plan = plan_of(model, HOOKS, QWEN)
    (told,) = [problem for problem in plan.problems if "experimental" in problem.message]
    assert not told.fatal
    assert "--mmproj" in told.message
    spec, tokens = plan.models[0].spec, vocabulary()["tokenizer.ggml.tokens"]
    assert spec.tokens["image"] == (tokens.index(IMAGE),)
    plain = make_test_plan(model.text, TOY_HOOKS, HOOKS)
    assert not [problem for problem in plain.problems if "experimental" in problem.message]


def test_without_the_plugin_of_the_encoder_its_package_is_named(tmp_path):
    with pytest.raises(ModelFormatError) as caught:
        plan_of(model_of(tmp_path, "v4"), HOOKS)
    for words in ("mmproj.gguf", "clip.qwen3vl_merger", "pip install luce-arch-qwen35 "):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "words", [{"image": None}, {"image": "<nothing>"}, {"kind": TokenType.NORMAL}], ids=str
)
def test_a_vocabulary_without_a_token_for_images_is_one_error(words, tmp_path):
    """A token of ordinary text is none: anybody could write it."""
    model = model_of(tmp_path, "v4", **words)
    with pytest.raises(ModelFormatError, match="no token that could stand for") as caught:
        plan_of(model, HOOKS, QWEN)
    assert "mmproj.gguf" in str(caught.value)
    assert "'<｜image｜>'" in str(caught.value)


def test_the_best_token_is_taken(tmp_path):
    model = model_of(tmp_path, "v4", image="<image>", kind=TokenType.USER_DEFINED)
    plan = plan_of(model, HOOKS, QWEN)
    assert media_processor(plan, registry_of(TOY_HOOKS, HOOKS, QWEN)).placeholder == "<image>"


def test_qwens_own_models_are_still_asked_for_their_positions(tmp_path):
    """A model that borrows nothing is refused as before."""
    from luce_core.testing.dense.model import write_dense_model

    tower = write_tower(tmp_path / "mmproj.gguf", 256)
    options = {"mmproj": str(tower), "threads": 1}
    with pytest.raises(ModelFormatError, match="no positions for the rows and columns"):
        make_test_plan(
            write_dense_model(tmp_path / "dense.gguf"),
            TOY_HOOKS,
            QWEN,
            "luce_core.testing.dense.hooks",
            options=options,
        )


# --- served


@contextmanager
def served_by(model, *, seeing=True):
    torch.set_num_threads(1)
    options = {key: value for key, value in model.options.items() if seeing or key != "mmproj"}
    pipeline = make_pipeline(model.text, TOY_HOOKS, HOOKS, QWEN, options=options)
    registry, tokenizer = registry_of(TOY_HOOKS, HOOKS, QWEN), pipeline.target.tokenizer
    processor = media_processor(pipeline.plan, registry)
    reader = None
    if processor is not None:
        reader = ImageReader(processor, tokenizer.token_id(processor.placeholder), max_images=4)
    template = ChatTemplate.from_metadata(read_header(model.text).metadata)
    chat = compose_chat(pipeline.plan, registry, tokenizer, template)
    with serving(pipeline, images=reader, chat=chat) as served:
        yield served, pipeline, processor


@pytest.fixture(scope="module", params=PARTS)
def model(request, tmp_path_factory):
    return model_of(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def running(model):
    with served_by(model) as running:
        yield running


def shown(*parts):
    """Texts and images as the content of a message."""
    found = []
    for part in parts:
        if isinstance(part, str):
            found.append({"type": "text", "text": part})
            continue
        url = f"data:image/png;base64,{base64.b64encode(png(part)).decode()}"
        found.append({"type": "image_url", "image_url": {"url": url}})
    return found


def ask(running, *parts, **more):
    with openai.OpenAI(base_url=f"{running[0].url}/v1", api_key="none", max_retries=0) as client:
        given = {"model": "toy", "max_tokens": LENGTH, "temperature": 0, "logprobs": True, **more}
        return client.chat.completions.create(messages=[{"role": "user", "content": shown(*parts)}], **given)


def oracle_answer(model, running, *parts):
    """(rows of the prompt, what the oracle writes behind it), with the rows the encoder makes."""
    served, pipeline, processor = running
    tokenizer = served.service.face.tokenizer
    (encoder,) = pipeline.encoders
    ids, given = [tokenizer.token_id(SPECIAL[0]), tokenizer.token_id("<｜User｜>")], {}
    for part in parts:
        if isinstance(part, str):
            ids += tokenizer.encode(part)
            continue
        rows = list(encoder.encode((processor.prepare(part),)))[-1].numpy()
        given |= dict(zip(range(len(ids), len(ids) + len(rows)), rows, strict=True))
        ids += [tokenizer.token_id(IMAGE)] * len(rows)
    ids += [tokenizer.token_id("<｜Assistant｜>"), tokenizer.token_id("</think>")]
    prompt = len(ids)
    while len(ids) < prompt + LENGTH and ids[-1] not in tokenizer.eog:
        logits = model.oracle.run(ids, given)[-1]
        best, second = np.argsort(logits)[[-1, -2]]
        assert logits[best] - logits[second] > 1e-4, "the two best tokens cannot be told apart in float32"
        ids.append(int(best))
    assert model.oracle.margin > 1e-6, "a choice is too close to be told apart in float32"
    answer = [token for token in ids[prompt:] if token not in tokenizer.eog]
    return prompt, [tokenizer.token_bytes(token).decode(errors="replace") for token in answer]


def written(answer):
    return [entry.token for entry in answer.choices[0].logprobs.content]


def test_the_official_client_gets_the_oracles_answer(model, running):
    """Two images among text, cut into chunks of twelve rows; then the same from the cache."""
    parts = ("see ", A, " or ", B, "?")
    prompt, want = oracle_answer(model, running, *parts)
    first, again = ask(running, *parts), ask(running, *parts)
    assert first.usage.prompt_tokens == prompt > 2 * ROWS
    assert written(first) == written(again) == want
    assert again.usage.prompt_tokens_details.cached_tokens > prompt - 3


def test_equal_images_are_found_again_and_others_never(model, running):
    C, D = picture(*SIZE, 3), picture(*SIZE, 4)
    first, other, again = ask(running, C, "so"), ask(running, D, "so"), ask(running, C.copy(), "so")
    assert first.usage.prompt_tokens == other.usage.prompt_tokens
    assert other.usage.prompt_tokens_details.cached_tokens <= 2  # what is before the image
    assert again.usage.prompt_tokens_details.cached_tokens > ROWS
    assert written(again) == written(first) == oracle_answer(model, running, C, "so")[1]
    assert written(other) == oracle_answer(model, running, D, "so")[1]


def test_side_by_side(model, running):
    """Images and text at the same time, each answered as alone."""
    asked = [(picture(*SIZE, 5), "a"), ("only text",), ("b", picture(*SIZE, 7))]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda parts: ask(running, *parts), asked))
    assert [written(answer) for answer in answers] == [
        oracle_answer(model, running, *parts)[1] for parts in asked
    ]


def test_text_cannot_spell_an_image(running):
    typed, plain = ask(running, f"{IMAGE}!", A), ask(running, "!", A)
    assert typed.usage.prompt_tokens > plain.usage.prompt_tokens + 5


def refused(served):
    """The code of the 400 for a message with an image."""
    body = {"messages": [{"role": "user", "content": shown("see ", A)}]}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["code"]


def test_a_template_that_shows_no_images_refuses_them(tmp_path):
    """The published one of V4, which is made for text."""
    with served_by(model_of(tmp_path, "v4", template=True)) as (served, _, _):
        assert refused(served) == "chat_template_error"


def test_without_a_projector_an_image_is_refused(model):
    with served_by(model, seeing=False) as (served, _, _):
        assert refused(served) == "image_unsupported"
        card = httpx.get(f"{served.url}/v1/models").json()["data"][0]
        assert card["input_modalities"] == ["text"]
