"""Reading the text of an option: strict, and the same for flags and environment."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from luce_core.option_fields import OptionInfo, model_fields, parse_size, show_size


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Sample(BaseModel):
    switch: bool = False
    count: int = 1
    ratio: float = 0.5
    size: Annotated[int, OptionInfo("bytes")] = 0
    path: Path | None = None
    word: str = "x"
    maybe: str | None = None
    pick: Literal["a", "b"] = "a"
    colour: Colour = Colour.RED
    words: tuple[str, ...] = ()
    numbers: list[int] = []
    secret: Annotated[str, OptionInfo(secret=True)] = ""


FIELDS = {item.field: item for item in model_fields(Sample, "core")}
OWN = {item.field: item for item in model_fields(Sample, "my-cpu")}


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("switch", "1", True),
        ("switch", "Yes", True),
        ("switch", "off", False),
        ("count", "-12", -12),
        ("ratio", "1e-3", 0.001),
        ("ratio", "2", 2.0),
        ("size", "8GiB", 8 * 2**30),
        ("size", "1.5 MB", 1_500_000),
        ("size", "77", 77),
        ("path", "/a/b", Path("/a/b")),
        ("path", "none", None),
        ("word", "none", "none"),
        ("maybe", "none", None),
        ("pick", "b", "b"),
        ("colour", "blue", "blue"),
        ("words", "a, b,,c", ("a", "b", "c")),
        ("words", "none", ()),
        ("numbers", "1,2", (1, 2)),
    ],
)
def test_text_becomes_a_value(field, text, value):
    assert FIELDS[field].parse(text) == value
    assert type(FIELDS[field].parse(text)) is type(value)


@pytest.mark.parametrize(
    ("field", "text", "wanted"),
    [
        ("switch", "", "one of 1, true"),
        ("switch", "maybe", "one of 1, true"),
        ("switch", "2", "one of 1, true"),
        ("count", "", "whole number"),
        ("count", "1.0", "whole number"),
        ("count", "1_000", "whole number"),
        ("count", "٣", "whole number"),
        ("count", "0x10", "whole number"),
        ("count", " 1", "whole number"),
        ("ratio", "nan", "finite"),
        ("ratio", "inf", "finite"),
        ("ratio", "1_0", "finite"),
        ("ratio", "half", "a number"),
        ("size", "-1", "a size such as 8GiB"),
        ("size", "8XB", "a size such as 8GiB"),
        ("size", "1.5", "a size such as 8GiB"),
        ("size", "GiB", "a size such as 8GiB"),
        ("pick", "c", "one of a, b"),
        ("pick", "A", "one of a, b"),
        ("colour", "green", "one of blue, red"),
        ("numbers", "1,x", "whole number"),
    ],
)
def test_anything_else_is_refused_with_what_is_wanted(field, text, wanted):
    with pytest.raises(ValueError, match=wanted):
        FIELDS[field].parse(text)


def test_a_field_is_one_name_in_every_spelling():
    assert (FIELDS["switch"].flag, FIELDS["switch"].env, FIELDS["switch"].key) == (
        "--switch",
        "LUCE_SWITCH",
        "switch",
    )
    own = OWN["switch"]
    assert (own.name, own.flag, own.env, own.key) == (
        "my-cpu.switch",
        "--my-cpu-switch",
        "LUCE_MY_CPU_SWITCH",
        "[my-cpu] switch",
    )


def test_what_the_help_shows_for_a_value():
    shown = {name: item.metavar for name, item in FIELDS.items()}
    assert shown["pick"] == "a|b"
    assert shown["colour"] == "red|blue"
    assert shown["size"] == "SIZE"
    assert shown["count"] == "N"
    assert shown["path"] == "PATH"


def test_secrets_are_masked_and_nothing_else_is():
    assert FIELDS["secret"].show("hunter2") == "****"
    assert FIELDS["word"].show("hunter2") == "hunter2"
    assert FIELDS["switch"].show(True) == "on"
    assert FIELDS["words"].show(("a", "b")) == "a, b"
    assert FIELDS["maybe"].show(None) == "none"
    assert FIELDS["colour"].show(Colour.BLUE) == "blue"
    assert FIELDS["size"].show(3 * 2**20) == "3.00 MiB"


@given(st.integers(0, 2**60))
def test_a_shown_size_reads_back_within_its_digits(size):
    assert parse_size(show_size(size).replace(" ", "")) == pytest.approx(size, rel=0.006)


@given(st.integers(0, 2**70), st.sampled_from(["", "B"]))
def test_plain_bytes_are_exact(size, unit):
    assert parse_size(f"{size}{unit}") == size


@given(st.text())
def test_a_size_is_read_or_refused(text):
    try:
        size = parse_size(text)
    except ValueError as error:
        refusal = str(error)
    else:
        assert size >= 0
        return
    assert "wanted a size" in refusal
