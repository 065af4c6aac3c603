"""Typed reads return what the file holds or say what is wrong with which key."""

import re
from pathlib import Path

import numpy as np
import pytest

from luce_core.errors import ModelFormatError
from luce_core.gguf import FORMATS, GgufHeader, StringArray, TensorInfo

NAN, INF = float("nan"), float("inf")


def refused(pattern: str):
    return pytest.raises(ModelFormatError, match=pattern)


def strings(*texts: str) -> StringArray:
    parts = [text.encode() for text in texts]
    return StringArray(b"".join(parts), np.cumsum([len(part) for part in parts], dtype=np.int64))


VALUES = {
    "general.architecture": "tiny",
    "tiny.count": 7,
    "tiny.big": 2**63,
    "tiny.negative": -1,
    "tiny.number": 1.5,
    "tiny.nan": NAN,
    "tiny.inf": INF,
    "tiny.yes": True,
    "tiny.no": False,
    "tiny.text": "hello",
    "tiny.strings": strings("a", "", "é"),
    "tiny.uints": np.array([3, 0, 4], np.int32),
    "tiny.ints": np.array([3, -1], np.int32),
    "tiny.floats": np.array([0.5, 2.0], np.float32),
    "tiny.infs": np.array([0.5, INF], np.float32),
    "tiny.bools": np.array([True, False]),
    "tiny.nested": (np.array([1]), np.array([2])),
    "tiny.empty": np.array([], np.float32),
    "tiny.empty_strings": strings(),
}


@pytest.fixture
def header() -> GgufHeader:
    info = TensorInfo("w", (3, 64), FORMATS.by_name("Q8_0"), 204, 0, 96)
    return GgufHeader(Path("m.gguf"), 3, VALUES, {"w": info}, (Path("m.gguf"),))


def test_arch(header):
    assert header.arch == "tiny"


@pytest.mark.parametrize("value", [None, 3, strings("a")])
def test_arch_missing_or_no_string(value):
    metadata = {} if value is None else {"general.architecture": value}
    header = GgufHeader(Path("m.gguf"), 3, metadata, {}, (Path("m.gguf"),))
    with refused(r"'general.architecture' is .*; wanted a string"):
        _ = header.arch
    with refused("'general.architecture'"):
        header.uint("{a}.count")


def test_the_right_types_are_returned(header):
    assert header.uint("{a}.count") == 7
    assert header.uint("tiny.big", high=2**64) == 2**63
    assert header.uint("tiny.negative", low=-5) == -1
    assert header.float("{a}.number") == 1.5
    assert header.float("{a}.count") == 7.0
    assert isinstance(header.float("{a}.count"), float)
    assert header.bool("{a}.yes") is True
    assert header.bool("{a}.no") is False
    assert header.str("{a}.text") == "hello"
    assert header.strings("{a}.strings") == ("a", "", "é")
    assert header.uints("{a}.uints") == (3, 0, 4)
    assert header.uints("{a}.ints", low=-1) == (3, -1)
    assert header.floats("{a}.floats") == (0.5, 2.0)
    assert header.floats("{a}.uints") == (3.0, 0.0, 4.0)
    assert header.bools("{a}.bools") == (True, False)


def test_elements_are_plain_python_values(header):
    assert {type(value) for value in header.uints("{a}.uints")} == {int}
    assert {type(value) for value in header.floats("{a}.floats")} == {float}
    assert {type(value) for value in header.bools("{a}.bools")} == {bool}


@pytest.mark.parametrize("key", ["{a}.empty", "{a}.empty_strings"])
def test_an_empty_array_is_an_empty_array_of_anything(header, key):
    assert header.strings(key) == header.uints(key) == header.floats(key) == header.bools(key) == ()


GOOD = {
    "uint": {"count"},
    "float": {"count", "number", "big", "negative"},
    "bool": {"yes", "no"},
    "str": {"text"},
    "strings": {"strings", "empty", "empty_strings"},
    "uints": {"uints", "empty", "empty_strings"},
    "floats": {"uints", "ints", "floats", "empty", "empty_strings"},
    "bools": {"bools", "empty", "empty_strings"},
}


@pytest.mark.parametrize("read", GOOD)
@pytest.mark.parametrize("key", [key.removeprefix("tiny.") for key in VALUES if key.startswith("tiny.")])
def test_every_read_refuses_every_other_type(header, read, key):
    if key in GOOD[read]:
        getattr(header, read)("{a}." + key)
        return
    with refused(re.escape(f"GGUF file 'm.gguf': metadata key 'tiny.{key}' is ")):
        getattr(header, read)("{a}." + key)
    with pytest.raises(ModelFormatError):
        getattr(header, read)("{a}." + key, None)


@pytest.mark.parametrize("read", GOOD)
def test_a_missing_key_is_the_default_or_an_error(header, read):
    assert getattr(header, read)("{a}.absent", None) is None
    assert getattr(header, read)("{a}.absent", default=5) == 5
    with refused(r"metadata key 'tiny.absent' is missing; wanted .*\. .*convert"):
        getattr(header, read)("{a}.absent")


def test_messages_say_got_and_wanted(header):
    with refused("is the string 'hello'; wanted an integer from 1 to 9"):
        header.uint("{a}.text", low=1, high=9)
    with refused("is an array of 3 strings; wanted a string"):
        header.str("{a}.strings")
    with refused("is an array of 2 arrays; wanted an array of finite numbers"):
        header.floats("{a}.nested")
    with refused("is true; wanted a finite number"):
        header.float("{a}.yes")


@pytest.mark.parametrize(("low", "high", "fits"), [(7, 7, True), (8, 9, False), (0, 6, False)])
def test_bounds_are_included(header, low, high, fits):
    if fits:
        assert header.uint("{a}.count", low=low, high=high) == 7
    else:
        with refused(f"is the number 7; wanted an integer from {low} to {high}"):
            header.uint("{a}.count", low=low, high=high)


def test_every_element_is_held_to_the_bounds(header):
    with refused("wanted an array of integers from 1 to 9"):
        header.uints("{a}.uints", low=1, high=9)
    with refused("wanted an array of integers from 0 to 3"):
        header.uints("{a}.uints", high=3)


def test_per_layer_uint(header):
    assert header.per_layer_uint("{a}.count", 3) == (7, 7, 7)
    assert header.per_layer_uint("{a}.uints", 3) == (3, 0, 4)
    assert header.per_layer_uint("{a}.absent", 2, 9) == (9, 9)
    with refused("'tiny.absent' is missing; wanted an integer"):
        header.per_layer_uint("{a}.absent", 2)
    with refused("an array of 3 int32 values; wanted .* or an array of 4 of them"):
        header.per_layer_uint("{a}.uints", 4)
    with refused("from 1 to"):
        header.per_layer_uint("{a}.uints", 3, low=1)
    with refused("is true"):
        header.per_layer_uint("{a}.yes", 3)


def test_has_and_key(header):
    assert header.has("{a}.count")
    assert not header.has("{a}.absent")
    assert header.key("{a}.x.{a}") == "tiny.x.tiny"


def test_tensor(header):
    assert header.tensor("w").num_bytes == 204
    assert header.tensor("w", (3, 64)).row_bytes == 68
    with refused(r"tensor 'w' has the shape \[3, 64\]; wanted \[64, 3\]"):
        header.tensor("w", (64, 3))
    with refused("tensor 'v' is missing"):
        header.tensor("v")
