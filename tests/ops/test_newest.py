"""What the device knows of texts whose newest token the host has not seen."""

import torch

from luce_core.ops.marks import EMITTED
from luce_core.ops.newest import AHEAD, MOST_ENDS, NewestTokens, newest_tokens, note_picks


def tensor(*numbers, kind=torch.int32):
    return torch.tensor(numbers, dtype=kind)


def noted(newest, slots, picks, counts):
    picked = tensor(*picks, kind=torch.int64)
    return note_picks(None, picked, tensor(*counts), tensor(*slots), newest).tolist()


def read(newest, slots, tokens):
    token, count = newest_tokens(None, tensor(*tokens), tensor(*slots), newest)
    assert token.dtype == count.dtype == torch.int32
    return token.tolist(), count.tolist()


def test_tokens_come_from_the_slot_that_picked_them():
    newest = NewestTokens(4, "cpu")
    assert noted(newest, [2, 0], [70, 80], [1, 1]) == [70, 80]
    assert read(newest, [0, 2, 0], [AHEAD, AHEAD, 9]) == ([80, 70, 9], [1, 1, 1])


def test_a_text_that_ended_stays_ended_until_the_host_writes_a_token():
    newest = NewestTokens(4, "cpu")
    newest.take(1, {50, 60})
    newest.take(3, ())
    assert noted(newest, [1, 3], [60, 60], [1, 1]) == [60, 60]  # the pick that ends it is text
    assert read(newest, [1, 3], [AHEAD, AHEAD]) == ([0, 60], [0, 1])
    assert noted(newest, [1, 3], [12, 13], [0, 1]) == [AHEAD, 13]
    assert read(newest, [1, 3], [AHEAD, AHEAD]) == ([0, 13], [0, 1])
    newest.take(1, ())
    assert read(newest, [1], [7]) == ([7], [1])
    assert noted(newest, [1], [60], [1]) == [60]
    assert read(newest, [1], [AHEAD]) == ([60], [1])


def test_picks_are_counted_and_those_behind_an_end_are_not():
    newest, marks = NewestTokens(3, "cpu"), torch.ones(3, 9, dtype=torch.int32)
    newest.take(0, {7})
    for count in (1, 1, 0):
        note_picks(None, tensor(7, 4, kind=torch.int64), tensor(count, 1), tensor(0, 2), newest, marks)
    assert (marks != 1).nonzero().tolist() == [[0, 7], [2, 4]]
    assert marks[[0, 2], [7, 4]].tolist() == [1 + 2 * EMITTED, 1 + 3 * EMITTED]


def test_more_ends_than_there_is_room_for_are_not_told():
    newest = NewestTokens(2, "cpu")
    newest.take(0, range(MOST_ENDS))
    newest.take(1, range(MOST_ENDS + 1))
    assert [newest.tells_ends(slot) for slot in (0, 1)] == [True, False]
