import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from luce_core.contracts import Media, MediaSpan
from luce_core.errors import RequestError
from luce_core.media.placing import place, row_keys
from luce_core.model.positions import prompt_positions

PAD = 9


def media(height=2, width=3, digest=b"d" * 16):
    return Media("e", height * width, (height, width), digest, (1,), b"x")


def test_rows_take_the_place_of_the_placeholder():
    one, two = media(2, 3), media(1, 1)
    placed = place([5, PAD, 6, PAD], PAD, [one, two])
    assert placed.ids == (5, *[PAD] * 6, 6, PAD)
    assert placed.media == (MediaSpan(1, one), MediaSpan(8, two))
    assert placed.media[0].stop == 7
    assert (placed.keys[0], placed.keys[7]) == (5, 6)
    assert list(placed.keys[1:7]) == row_keys(one)
    assert place([5, 6], PAD, []).keys == ()


@pytest.mark.parametrize(("ids", "count"), [([5], 1), ([PAD], 0), ([PAD, PAD], 1)])
def test_a_template_must_show_every_image_once(ids, count):
    with pytest.raises(RequestError, match=f"has {count} images.* shows {ids.count(PAD)}"):
        place(ids, PAD, [media()] * count)


def test_keys_are_of_the_content_and_no_token_has_one():
    one = media(30, 40)
    keys = row_keys(one)
    assert keys == row_keys(media(30, 40))
    assert len(set(keys)) == 1200
    assert all(2**62 <= key < 2**63 for key in keys)
    others = (evolve(one, digest=b"e" * 16), evolve(one, grid=(40, 30)), evolve(one, encoder="f"))
    for other in others:
        assert not set(row_keys(other)) & set(keys)


def mrope(parts):
    """By the rule as it is told: text counts on, an image's rows and columns count from where it begins, and
    text goes on behind its longer side."""
    out, at = [], 0
    for part in parts:
        if isinstance(part, int):
            out += [(at + i,) * 3 for i in range(part)]
            at += part
        else:
            height, width = part
            out += [(at, at + y, at + x) for y in range(height) for x in range(width)]
            at += max(height, width)
    return [list(axis) for axis in zip(*out, strict=True)], at


PARTS = st.lists(st.one_of(st.integers(0, 5), st.tuples(st.integers(1, 6), st.integers(1, 6))), min_size=1)


@given(PARTS)
def test_positions_of_prompts_with_images(parts):
    parts = [*parts, 1]
    ids, items = [], []
    for part in parts:
        if isinstance(part, int):
            ids += [1] * part
        else:
            ids.append(PAD)
            items.append(media(*part))
    placed = place(ids, PAD, items)
    got, shift = prompt_positions(3, len(placed.ids), placed.media)
    want, after = mrope(parts)
    assert got.tolist() == want
    assert len(placed.ids) + shift == after
    flat, none = prompt_positions(1, len(placed.ids), placed.media)
    assert (flat.tolist(), none) == ([list(range(len(placed.ids)))], 0)
