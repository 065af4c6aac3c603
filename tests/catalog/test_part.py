import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.catalog.part import Part
from luce_core.errors import DownloadError

LIMIT = 1000


def failing(data):
    yield data
    raise ConnectionError("the cable")


def test_begins_empty(tmp_path):
    part = Part.open(tmp_path / "new", LIMIT)
    assert (part.num_segments, part.num_bytes, part.path.read_bytes()) == (0, 0, b"")


def test_goes_on_behind_whole_segments_and_cuts_the_torn_one(tmp_path):
    part = Part.open(tmp_path, LIMIT)
    part.append([b"one", b"two"])
    with pytest.raises(ConnectionError):
        part.append(failing(b"torn"))
    assert part.path.read_bytes() == b"onetwotorn"
    again = Part.open(tmp_path, LIMIT)
    assert (again.num_segments, again.num_bytes) == (1, 6)
    assert again.path.read_bytes() == b"onetwo"
    again.append([b"three"])
    assert again.path.read_bytes() == b"onetwothree"


def test_the_same_object_may_try_a_failed_segment_again(tmp_path):
    part = Part.open(tmp_path, LIMIT)
    with pytest.raises(ConnectionError):
        part.append(failing(b"a long torn segment"))
    part.append([b"short"])
    assert part.path.read_bytes() == b"short"


def test_a_file_shorter_than_the_journal_says_begins_anew(tmp_path):
    part = Part.open(tmp_path, LIMIT)
    part.append([b"123456"])
    part.path.write_bytes(b"123")
    assert Part.open(tmp_path, LIMIT).num_segments == 0


@pytest.mark.parametrize(
    "journal",
    ["", "{", "[]", "null", '{"segments": 1}', '{"segments": "1", "bytes": 3}', '{"segments":-1,"bytes":-1}'],
)
def test_a_journal_without_sense_begins_anew(tmp_path, journal):
    part = Part.open(tmp_path, LIMIT)
    part.append([b"123"])
    (tmp_path / "journal.json").write_text(journal)
    again = Part.open(tmp_path, LIMIT)
    assert (again.num_segments, again.num_bytes, again.path.read_bytes()) == (0, 0, b"")


def test_a_source_that_never_ends_is_stopped_at_the_promised_size(tmp_path):
    def endless():
        while True:
            yield b"x" * 100

    part = Part.open(tmp_path, LIMIT)
    with pytest.raises(DownloadError, match=r"Source 1 .* wanted 1000"):
        part.append(endless())
    assert part.path.stat().st_size <= LIMIT
    assert part.num_segments == 0


def test_adopting_moves_the_file(tmp_path):
    file = tmp_path / "fetched"
    file.write_bytes(b"whole")
    part = Part.open(tmp_path / "work", LIMIT)
    part.adopt(file)
    assert not file.exists()
    assert part.path.read_bytes() == b"whole"
    assert json.loads((tmp_path / "work" / "journal.json").read_text()) == {"segments": 1, "bytes": 5}


def test_adopting_an_oversized_file_is_refused(tmp_path):
    file = tmp_path / "fetched"
    file.write_bytes(b"x" * (LIMIT + 1))
    with pytest.raises(DownloadError, match="wanted 1000"):
        Part.open(tmp_path / "work", LIMIT).adopt(file)


@given(st.lists(st.tuples(st.binary(max_size=20), st.booleans()), max_size=8))
def test_any_run_of_interruptions_ends_in_the_same_file(tmp_path_factory, attempts):
    """Reference: the concatenation of the segments whose append succeeded."""
    folder = tmp_path_factory.mktemp("part")
    wanted = b""
    for data, fails in attempts:
        part = Part.open(folder, LIMIT)
        if fails:
            with pytest.raises(ConnectionError):
                part.append(failing(data))
        else:
            part.append([data])
            wanted += data
    assert Part.open(folder, LIMIT).path.read_bytes() == wanted
