import time

import pytest

from luce_core.cli.rows import HEADER, HEADER_EVERY, RequestRows, decode_speed, row
from luce_core.contracts import Done, RequestRecord

NOON = time.struct_time((2026, 1, 2, 12, 34, 56, 4, 2, 0))


def record(reason="stop", usage=None, timings=None, **more):
    usage = {"prompt_tokens": 1200, "completion_tokens": 101, "cached_tokens": 300, **(usage or {})}
    timings = {"decode_ms": 500.0, "ttft_ms": 210.0, **(timings or {})}
    return RequestRecord("r", "chat", "m", Done("r", reason, usage, timings, **more))


def test_a_row_has_every_figure_under_its_heading():
    shown = row(record(), NOON)
    assert shown.split() == ["12:34:56", "chat", "1200", "25.0%", "0.21", "s", "200.0", "101", "stop"]
    for heading, cell in (("prompt", "1200"), ("cached", "25.0%"), ("TTFT", "0.21 s"), ("tokens", "101")):
        end = HEADER.index(heading) + len(heading)
        assert shown[end - len(cell) : end] == cell
    assert shown.index("stop") == HEADER.index("finish")


def test_what_never_happened_is_a_dash():
    empty = Done("r", "cancelled", {}, {})
    assert row(RequestRecord("r", "chat", "m", empty), NOON).split() == [
        "12:34:56", "chat", "0", "-", "-", "-", "0", "cancelled",
    ]


def test_an_error_and_parts_that_stepped_aside_are_named():
    assert row(record("error", error="no memory"), NOON).endswith("error: no memory")
    assert row(record(aside=("dflash: no taps",)), NOON).endswith("stop; dflash: no taps")
    drafted = record(usage={"drafted_tokens": 50, "accepted_tokens": 40})
    assert row(drafted, NOON).endswith("stop, 80% of drafts accepted")


@pytest.mark.parametrize(("tokens", "ms", "speed"), [(101, 500.0, 200.0), (1, 500.0, None), (9, 0.0, None)])
def test_decode_speed_does_not_count_the_first_token(tokens, ms, speed):
    assert decode_speed(Done("r", "stop", {"completion_tokens": tokens}, {"decode_ms": ms})) == speed


def test_the_header_comes_first_and_again_after_a_screen():
    lines = []
    rows = RequestRows(lines.append, lambda: NOON)
    for _ in range(HEADER_EVERY + 1):
        rows(record())
    assert [place for place, line in enumerate(lines) if line == HEADER] == [0, HEADER_EVERY + 1]
    assert len(lines) == HEADER_EVERY + 3
