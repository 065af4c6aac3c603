"""Rows given as embeddings, as those of images are, against the float64 oracles: V4 and V4.1, with and
without a router's bias of their own, however the text is cut.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from attrs import evolve, frozen

from luce_core.model.batch import make_batch
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.rig import ModelRig

from .hugging_face import ALL, NEAR, SELECTED, metadata_of, random_model, tensors_of
from .models_v41 import BASE, WHOLE, random_tensors, text_of
from .models_v41 import metadata_of as metadata_v41
from .oracle_v4 import OracleV4
from .oracle_v41 import Oracle

HOOKS = "luce_arch_deepseek4.hooks"
TOLERANCE = 5e-6
"""As a share of the largest logit."""
LENGTH, CHUNKS_END = 48, 38
IMAGES = [*range(9, 16), *range(22, 27), 33]
"""Rows of three images: over the ends of compressed entries, beyond a window, one row alone."""
PAD = 7
"""The token that stands for them."""
V4 = {"layer_types": [NEAR, SELECTED, ALL, SELECTED], "num_hidden_layers": 4, "num_hash_layers": 2}


def v4_parts():
    config, model = random_model(V4)
    metadata = metadata_of(config)
    keys = {key.removeprefix("deepseek4."): value for key, value in metadata.items()}
    return OracleV4, keys, metadata, tensors_of(model)


def v41_parts():
    keys = {**BASE, **WHOLE}
    return Oracle, keys, metadata_v41(keys), random_tensors(keys)


PARTS = {"v4": v4_parts, "v4.1": v41_parts}


@frozen(eq=False)
class Model:
    path: object
    oracle: Oracle
    width: int

    def rig(self):
        torch.set_num_threads(1)
        return ModelRig(self.path, HOOKS, block_tokens=24)

    def want(self, text):
        logits = torch.tensor(self.oracle.run(text.ids, text.given)).float()
        assert self.oracle.margin > 1e-6, "a choice is too close to be told apart in float32"
        return logits


@frozen(eq=False)
class Text:
    """Tokens, and the rows that are none."""

    ids: list
    given: dict

    def rows(self, start, stop):
        """As `RowSet.embeds` of a batch that begins at `start`."""
        return [
            (index - start, torch.tensor(row)[None])
            for index, row in self.given.items()
            if start <= index < stop
        ]


def text_with(width, seed=4):
    noise = np.random.default_rng(seed).standard_normal((len(IMAGES), width)).astype(np.float32)
    given = dict(zip(IMAGES, noise, strict=True))
    return Text([PAD if t in given else token for t, token in enumerate(text_of(LENGTH))], given)


def made(folder, name, biased):
    """biased: layers whose router has a bias for given rows."""
    kind, keys, metadata, tensors = PARTS[name]()
    noise = np.random.default_rng(11)
    for layer in range(keys["block_count"]):
        bias = noise.standard_normal(keys["expert_count"]).astype(np.float32)
        if layer in biased:
            tensors[f"blk.{layer}.exp_probs_b_vl.bias"] = bias
    path = write_gguf(folder / "m.gguf", metadata, tensors)
    return Model(path, kind(keys, tensors), keys["embedding_length"])


def run(rig, work):
    """{seq: (text, start, stop)} as one prefill -> logits of all rows, per sequence."""
    rows = [
        rig._rows(seq, text.ids[a:b], wanted=range(b - a), embeds=text.rows(a, b))
        for seq, (text, a, b) in work.items()
    ]
    logits = rig.backend.head(rig.backend.forward(make_batch("prefill", rows)).final)
    for seq, (text, a, b) in work.items():
        rig.blocks.advance(seq, text.ids[a:b])
    return torch.split(logits, [b - a for _, a, b in work.values()])


def assert_close(got, want):
    assert got.shape == want.shape
    worst = float((got - want).abs().max() / want.abs().max())
    assert worst <= TOLERANCE, f"logits differ by {worst:.2g} of the largest"


CASES = [("v4", ()), ("v4", (0, 2, 3)), ("v4.1", ()), ("v4.1", tuple(range(7)))]
"""Of V4, experts of layers 0 and 1 are chosen by id."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} {len(case[1])} biases")
def case(request, tmp_path_factory):
    model = made(tmp_path_factory.mktemp("model"), *request.param)
    text = text_with(model.width)
    return model, text, model.want(text)


def test_in_one_piece_and_cut_within_images_then_single_tokens(case):
    model, text, want = case
    rig = model.rig()
    whole = rig.open()
    assert_close(run(rig, {whole: (text, 0, LENGTH)})[0], want)
    seq = rig.open()
    parts = [run(rig, {seq: (text, a, b)})[0] for a, b in pairwise([0, 5, 11, 12, 24, CHUNKS_END])]
    parts.append(torch.stack([rig.decode(seq, token) for token in text.ids[CHUNKS_END:]]))
    assert_close(torch.cat(parts), want)


def test_beside_others_in_a_batch(case):
    """One that is text alone, and one with other rows in the same places."""
    model, text, want = case
    rig = model.rig()
    plain = Text(text_of(LENGTH), {})
    other = text_with(model.width, seed=5)
    work = dict(zip((rig.open(), rig.open(), rig.open()), (plain, text, other), strict=True))
    found = [
        torch.cat(parts)
        for parts in zip(
            *(run(rig, {seq: (one, a, b) for seq, one in work.items()}) for a, b in ((0, 13), (13, LENGTH))),
            strict=True,
        )
    ]
    assert_close(found[1], want)
    assert_close(found[0], model.rig().fresh(plain.ids))
    assert float((found[2] - found[1])[IMAGES[0] :].abs().max()) > 0.1


def test_candidates_behind_an_image(case):
    """A right branch beside a wrong one, with windows, entries and n-grams that reach into the image."""
    model, text, want = case
    rig, start = model.rig(), IMAGES[-1] + 1
    seq = rig.open()
    run(rig, {seq: (text, 0, start)})
    right = text.ids[start : start + 6]
    tokens = [right[0], *(token ^ 1 for token in right[1:]), *right[1:]]
    held = rig.hold({seq: tokens}, {seq: [-1, *range(5), 0, *range(6, 10)]})
    path = [0, *range(6, 11)]
    assert_close(held.logits[0][path], want[start : start + 6])
    rig.commit(held, [path])
    rest = [rig.decode(seq, token) for token in text.ids[start + 6 :]]
    assert_close(torch.stack(rest), want[start + 6 :])


def test_the_oracle_of_v4_is_hugging_faces_model():
    """On text alone, which is all that takes."""
    config, model = random_model(V4)
    ids = text_of(LENGTH)
    keys = {key.removeprefix("deepseek4."): value for key, value in metadata_of(config).items()}
    oracle = OracleV4(keys, tensors_of(model))
    with torch.no_grad():
        assert_close(torch.tensor(oracle.run(ids)).float(), model(torch.tensor([ids])).logits[0])


@pytest.mark.parametrize(("biased", "same"), [((), False), ((2, 3), False), ((0, 1), True)])
def test_layers_that_choose_by_id_take_the_placeholders_unless_they_have_a_bias(biased, same, tmp_path):
    model = made(tmp_path, "v4", biased)
    text = text_with(model.width)
    others = evolve(text, ids=[token + (t in text.given) for t, token in enumerate(text.ids)])
    rig = model.rig()
    one, other = (run(rig, {rig.open(): (each, 0, LENGTH)})[0] for each in (text, others))
    assert torch.equal(one, other) == same
    assert_close(other[: IMAGES[0]], one[: IMAGES[0]])


def test_the_bias_of_given_rows_is_no_texts(tmp_path):
    """A file that has it answers about text as the one without."""
    for name in PARTS:
        folders = [tmp_path / f"{name}{part}" for part in range(2)]
        for folder in folders:
            folder.mkdir()
        plain, seeing = made(folders[0], name, ()), made(folders[1], name, range(9))
        assert torch.equal(plain.rig().fresh(text_of()), seeing.rig().fresh(text_of()))
