"""Images inside the engine: encoded while requests wait, in slices, and never for nothing."""

import numpy as np
import pytest
import torch
from attrs import evolve

from luce_core.contracts import MediaSpan, Progress
from luce_core.errors import EngineError
from luce_core.media import place
from luce_core.plan_media import media_processor
from luce_core.testing.dense.model import write_dense_model
from luce_core.testing.pictures import write_picture_model
from luce_core.testing.pipeline import GREEDY, TOY_HOOKS, EngineRig, make_pipeline, registry_of

HOOKS = (TOY_HOOKS, "luce_core.testing.dense.hooks", "luce_core.testing.pictures.hooks")


def image(height=8, width=12, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


class Seeing:
    """An engine, and prompts with images for it."""

    def __init__(self, folder, **options):
        text = write_dense_model(folder / "text.gguf")
        given = {"mmproj": str(write_picture_model(folder / "p.gguf")), "cache_type_k": "f32", "chunk": 8}
        options = {**given, "cache_type_v": "f32", "threads": 1, **options}
        self.rig = EngineRig(make_pipeline(text, *HOOKS, options=options))
        self.engine = self.rig.engine
        (self.encoder,) = self.rig.pipeline.encoders
        self.processor = media_processor(self.rig.pipeline.plan, registry_of(*HOOKS))
        self.pad = self.rig.pipeline.target.tokenizer.token_id(self.processor.placeholder)

    def placed(self, *parts):
        """parts: lists of tokens, and images."""
        ids, media = [], []
        for part in parts:
            if isinstance(part, list):
                ids += part
            else:
                ids.append(self.pad)
                media.append(self.processor.prepare(part))
        return place(ids, self.pad, media)

    def submit(self, *parts, length=6, **more):
        placed = self.placed(*parts)
        return self.rig.submit(placed.ids, length, media=placed.media, keys=placed.keys, **more)

    def answer(self, *parts, **more):
        answer = self.submit(*parts, **more)
        self.rig.run()
        assert answer.done.error is None, answer.done.error
        return answer


@pytest.fixture
def seeing(tmp_path):
    return lambda **options: Seeing(tmp_path, **options)


def phases(answer):
    return [(e.phase, e.done, e.total) for e in answer.events if isinstance(e, Progress)]


def test_rows_of_an_image_change_the_text_and_only_its_own(seeing):
    one = seeing()
    texts = [one.answer([1, 2], image(seed=seed), [3, 4]).ids for seed in range(4)]
    assert len({tuple(text) for text in texts}) > 1
    again = seeing(chunk=64)
    assert [again.answer([1, 2], image(seed=seed), [3, 4]).ids for seed in range(4)] == texts
    together = [one.submit([1, 2], image(seed=seed), [3, 4]) for seed in range(4)]
    one.rig.run()
    assert [answer.ids for answer in together] == texts


def test_the_rows_that_were_encoded_stand_in_place_of_the_placeholders(seeing):
    """Against the same numbers as rows of the embedding table: text is all there is then."""
    one = seeing()
    rows = list(one.encoder.encode([one.processor.prepare(image())]))[-1]
    target = one.rig.pipeline.target.backend
    table = next(call.args[1] for call in target.programs()[0].calls if call.op == "embed").packed
    params = evolve(GREEDY, logit_bias=dict.fromkeys(range(200, 206), -1000.0))  # the head is the same table
    want = one.answer([1, 2], image(), [3, 4], params=params).ids
    kept = table.clone()
    table[200:206] = rows
    try:
        assert one.rig.generate([1, 2, *range(200, 206), 3, 4], max_tokens=6, params=params) == [want]
    finally:
        table.copy_(kept)


def test_progress_counts_the_rows_that_are_encoded(seeing):
    answer = seeing().answer([1], image(), [2], image(16, 4, 1), [3])
    assert phases(answer)[:3] == [("queued", 0, 13), ("encoding", 6, 10), ("encoding", 10, 10)]
    assert phases(answer)[3][0] == "prefill"


def test_a_long_image_keeps_nobody_from_decoding(seeing, monkeypatch):
    """Others get a step between two slices."""
    monkeypatch.setattr("luce_core.engine.media.SLICE_S", 0.0)
    one = seeing()
    other = one.rig.submit([5, 6, 7], 12)
    one.engine.step()
    answer = one.submit([1], image(80, 4), [2])
    while not other.is_done:
        one.engine.step()
        assert not answer.is_done
    assert len(one.engine.waiting) == 1
    one.rig.run()
    assert len(answer.ids) == 6


def test_work_is_done_in_slices(seeing, monkeypatch):
    monkeypatch.setattr("luce_core.engine.media.SLICE_S", 0.0)
    one = seeing()
    pieces = []
    one.encoder.between = lambda: pieces.append(one.engine.counters["requests"])
    one.submit([1], image(80, 4), [2])
    for turn in range(1, 10):
        assert one.engine.step()
        assert len(pieces) == turn
    one.rig.run()
    assert len(pieces) == 20


@pytest.mark.parametrize("where", ["queued behind", "in the middle", "encoded"])
def test_a_request_that_is_cancelled_leaves_nothing(where, seeing, monkeypatch):
    monkeypatch.setattr("luce_core.engine.media.SLICE_S", 0.0)
    one = seeing()
    first = one.submit([1], image(80, 4), [2])
    second = one.submit([1], image(80, 4, 1), [2])
    for _ in range({"queued behind": 3, "in the middle": 3, "encoded": 21}[where]):
        one.engine.step()
    gone, stays = (second, first) if where == "queued behind" else (first, second)
    one.engine.cancel(f"r{0 if gone is first else 1}")
    one.rig.run()
    assert gone.done.reason == "cancelled"
    assert gone.ids == []
    assert len(stays.ids) == 6
    assert one.encoder.closed == (where == "in the middle")
    assert not one.engine.encoding


def test_a_deadline_that_passes_while_it_is_encoded(seeing, monkeypatch):
    monkeypatch.setattr("luce_core.engine.media.SLICE_S", 0.0)
    one = seeing()
    now = 100.0
    one.engine.clock = lambda: now
    answer = one.submit([1], image(80, 4), [2], deadline_s=5.0)
    one.engine.step()
    now = 106.0
    one.rig.run()
    assert answer.done.late
    assert "deadline" in answer.done.error


def test_an_encoder_that_fails_costs_its_own_request(seeing):
    one = seeing()
    bad = one.submit([1], image(80, 4), [2])
    plain, good = one.rig.submit([5, 6], 4), one.submit([1], image(seed=3), [2])
    pieces = iter(range(100))

    def fail():
        if next(pieces) == 3:
            raise RuntimeError("broken on purpose")

    one.encoder.between = fail
    one.rig.run()
    assert "broken on purpose" in bad.done.error
    assert (len(plain.ids), len(good.ids)) == (4, 6)
    assert one.engine.counters["failed_steps"] == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (torch.zeros(5, 256), r"shape \[5, 256\]"),
        (torch.zeros(6, 255), "wanted"),
        (torch.full((6, 256), torch.nan), "not finite"),
        (None, "made nothing"),
    ],
)
def test_rows_that_cannot_be_are_an_error_of_the_encoder(rows, said, seeing):
    one = seeing()

    def encode(items):
        yield None
        if rows is not None:
            yield rows

    one.encoder.encode = encode
    answer = one.submit([1], image(), [2])
    one.rig.run()
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(answer.done.error)


def test_what_the_prefix_cache_has_is_not_encoded(seeing):
    one = seeing()
    first = one.answer([1, 2], image(16, 16), [3, 4])
    assert one.engine.encoding.encoded == 1
    again = one.answer([1, 2], image(16, 16), [3, 5])
    assert one.engine.encoding.encoded == 1
    assert again.done.usage["cached_tokens"] == 2 + 16 + 1
    assert "encoding" not in {phase for phase, _, _ in phases(again)}
    other = one.answer([1, 2], image(16, 16, 9), [3, 4])
    assert other.done.usage["cached_tokens"] == 2
    assert one.engine.encoding.encoded == 2
    assert first.done.usage["cached_tokens"] == 0


def test_a_prefix_may_end_within_an_image(seeing):
    """Full blocks of the cache: what is behind them needs the image again."""
    one = seeing(cache_block=4)
    want = one.answer([1, 2], image(16, 16), [3, 4]).ids
    placed = one.placed([1, 2], image(16, 16), [3, 4])
    two = one.rig.submit((*placed.ids[:10], 7, 8), 1, keys=(*placed.keys[:10], 7, 8))
    one.rig.run()
    assert two.done.usage["cached_tokens"] > 2
    three = one.answer([1, 2], image(16, 16), [3, 4])
    assert three.ids == want


def test_the_same_image_at_once_is_encoded_once(seeing):
    one = seeing()
    answers = [one.submit([seed], image(80, 4), [2]) for seed in range(3)]
    one.rig.run()
    assert one.engine.encoding.encoded == 1
    assert all(len(answer.ids) == 6 for answer in answers)


def test_nothing_is_kept_of_images_that_are_past(seeing):
    """Encoded rows go as soon as the rows have state; they come back if that is lost."""
    one = seeing()
    answer = one.submit([1, 2], image(16, 16), list(range(3, 40)), length=20)
    while not answer.ids:
        one.engine.step()
    (seq,) = one.engine.running.values()
    assert seq.media._rows == {}
    assert len(one.engine.encoding._known) == 0
    one.engine._preempt(seq.id)
    one.engine.blocks.match = lambda keys: type("Hit", (), {"length": 0, "checkpoint": None})()
    one.engine._encode_first(seq, 0)
    one.rig.run()
    assert one.engine.encoding.encoded == 2
    assert answer.ids == seeing().answer([1, 2], image(16, 16), list(range(3, 40)), length=20).ids


def test_what_the_cache_loses_meanwhile_is_encoded_after_all(seeing):
    """It was there when the request came, and is gone when its turn comes."""
    one = seeing()
    want = one.answer([1, 2], image(16, 16), [3, 4]).ids
    answer = one.submit([1, 2], image(16, 16), [3, 4])
    one.engine._drain()
    assert not one.engine.encoding
    honest = one.engine.blocks.match
    one.engine.blocks.match = lambda keys: evolve(honest(keys), length=0, checkpoint=None)
    one.rig.run()
    assert one.engine.encoding.encoded == 2
    assert answer.ids == want


@pytest.mark.parametrize("change", ["order", "overlap", "end", "grid", "encoder"])
def test_images_that_cannot_be_there_are_an_error(change, seeing):
    one = seeing()
    placed = one.placed([1], image(), [2], image(seed=1), [3])
    first, second = placed.media
    media = {
        "order": (second, first),
        "overlap": (first, MediaSpan(first.first + 2, second.media)),
        "end": (MediaSpan(len(placed.ids) - 6, first.media),),
        "grid": (evolve(first, media=evolve(first.media, grid=(2, 2))), second),
        "encoder": (evolve(first, media=evolve(first.media, encoder="ears")), second),
    }[change]
    answer = one.rig.submit(placed.ids, 4, media=media, keys=placed.keys)
    one.rig.run()
    assert "Image" in answer.done.error


def test_a_text_model_has_no_encoder(tmp_path):
    rig = EngineRig(make_pipeline(write_dense_model(tmp_path / "t.gguf"), *HOOKS, options={"threads": 1}))
    with pytest.raises(EngineError, match="takes no rows"):
        Seeing(tmp_path).rig.pipeline.models["mmproj"].backend.forward(batch_of_one())
    assert rig.pipeline.encoders == ()


def batch_of_one():
    from luce_core.model.batch import RowSet, make_batch

    return make_batch("held", [RowSet(0, 0, [1], {})])


def test_no_more_is_encoded_ahead_than_may_wait(seeing, monkeypatch):
    """One place, many requests: rows of a few lie ready, the others are encoded when their turn comes."""
    one = seeing(max_sequences=1)
    row_bytes = 4 * 256
    monkeypatch.setattr("luce_core.engine.media.AHEAD_BYTES", 30 * row_bytes)
    answers = [one.submit([seed], image(16, 16, seed), [2]) for seed in range(8)]
    most = 0
    while not all(answer.is_done for answer in answers):
        one.engine.step()
        waiting = [
            seq.media.held_bytes for seq in one.engine.waiting.values() if seq not in one.engine.encoding
        ]
        most = max(most, sum(waiting))
    one.rig.check_empty()
    assert all(len(answer.ids) == 6 for answer in answers)
    assert 16 * row_bytes < most <= (30 + 16) * row_bytes
    assert one.engine.encoding._ahead == {}


def test_what_waits_encoded_and_never_fits_is_refused(seeing, monkeypatch):
    """The queue of images stands still then, and must not keep the engine from saying so."""
    one = seeing(cache_bytes=2**21)
    monkeypatch.setattr("luce_core.engine.media.AHEAD_BYTES", 1)
    answers = [one.submit([seed], image(80, 80, seed), list(range(200)), length=100) for seed in range(2)]
    reserve = one.engine.blocks.fits
    one.engine.blocks.fits = lambda *given, **more: False
    for _ in range(60):
        one.engine.step()
    assert all("cache cannot hold" in answer.done.error for answer in answers)
    one.engine.blocks.fits = reserve
    assert len(one.answer([1], image(), [2]).ids) == 6


def test_text_alone_is_not_looked_up_twice(seeing):
    one = seeing()
    honest, looked = one.engine.blocks.match, []
    one.engine.blocks.match = lambda keys: looked.append(len(keys)) or honest(keys)
    one.rig.generate([1, 2, 3], max_tokens=2)
    assert looked == [3]


def test_what_one_has_does_not_keep_it_from_the_rest(seeing, monkeypatch):
    """Its second image is encoded ahead, its first was cached and is lost before its turn comes."""
    one = seeing()
    monkeypatch.setattr("luce_core.engine.media.AHEAD_BYTES", 1)
    first, second = image(16, 16, 1), image(16, 16, 2)
    want = seeing().answer([1, 2], first, [3], second, [4]).ids
    one.answer([1, 2], first, [3])
    honest, lost = one.engine.blocks.match, []
    one.engine.blocks.match = lambda keys: (
        evolve(honest(keys), length=0, checkpoint=None) if lost else honest(keys)
    )
    answer = one.submit([1, 2], first, [3], second, [4])
    one.engine._drain()
    (seq,) = one.engine.waiting.values()
    assert seq.media.lacking(one.engine._cached(seq).length) == [1]
    while seq in one.engine.encoding:
        one.engine.encoding.run(one.engine._fail_step)
    lost.append(True)
    one.rig.run()
    assert answer.ids == want
    assert one.engine.encoding.encoded == 3
