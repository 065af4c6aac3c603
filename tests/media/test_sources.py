import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.errors import RequestError
from luce_core.media.sources import sources_of
from luce_core.text import normalize_messages


def user(*parts):
    return {"role": "user", "content": list(parts)}


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_in_the_order_of_the_messages():
    messages = [
        {"role": "system", "content": "s"},
        user("a", image("http://a/1"), {"type": "text", "text": "b"}, image("https://a/2")),
        {"role": "assistant", "content": None},
        {"role": "tool", "tool_call_id": "x", "content": [image("http://a/3")]},
    ]
    found = sources_of(messages)
    assert [(one.where, one.url) for one in found] == [
        ("messages[1].content[1]", "http://a/1"),
        ("messages[1].content[3]", "https://a/2"),
        ("messages[3].content[0]", "http://a/3"),
    ]
    shown = [p for m in normalize_messages(messages, images=True) for p in m["content"] if p and p != "s"]
    assert [part["type"] for part in shown if isinstance(part, dict)].count("image") == 3


@given(st.binary(max_size=200))
def test_data_urls_are_their_bytes(data):
    text = base64.b64encode(data).decode()
    for form in (
        image(f"data:image/png;base64,{text}"),
        {"type": "input_image", "image_url": f"DATA:;base64,{text}"},
        {"type": "image_url", "image_url": f"data:image/png;name=x;base64,{text.replace('=', '%3D')}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}},
    ):
        [source] = sources_of([user(form)])
        assert source.data == data


@pytest.mark.parametrize(("part", "said"), [
    ({"type": "image"}, "names no image"),
    ({"type": "input_image", "file_id": "f"}, "names no image"),
    ({"type": "image_url", "image_url": 5}, "names no image"),
    ({"type": "image_url", "image_url": {"url": None}}, "names no image"),
    ({"type": "image", "source": {"type": "base64", "data": 5}}, "no base64 data"),
    (image("ftp://a/b"), "ftp://a/b"),
    (image("x" * 5000), "is at 'xxx"),
    (image("data:,abc"), "base64"),
    (image("data:image/png;base64,ab$c"), "base64 data that is none"),
    (image("data:image/png;base64,é"), "base64 data that is none"),
    (image("data:image/png;base64,abc"), "base64 data that is none"),
])  # fmt: skip
def test_what_names_no_image_is_named(part, said):
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]") as caught:
        sources_of([user("a", part)])
    assert said in str(caught.value)
    assert caught.value.param == "messages[0].content[1]"
    assert len(str(caught.value)) < 300


def test_text_alone_has_none():
    assert sources_of([user("a"), {"role": "user", "content": "b"}, {"role": "user"}]) == []


FIELDS = ("type", "image_url", "url", "source", "data", "image", "text", "role", "content")
WORDS = ("image", "image_url", "input_image", "data:image/png;base64,", "data:,", "http://a", "base64")
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.sampled_from(WORDS)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.lists(JSON, max_size=3))
def test_garbage_is_an_error_of_the_request_or_an_image(parts):
    """Whatever the parts: two readers of one conversation see the same number of images, or one complains."""
    messages = [user(*parts), {"role": "user", "content": parts}]
    try:
        shown = normalize_messages(messages, images=True)
        found = sources_of(messages)
    except RequestError:
        return
    listed = [p for m in shown if isinstance(m["content"], list) for p in m["content"]]
    assert len(found) == sum(part["type"] == "image" for part in listed)
