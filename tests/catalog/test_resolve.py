import pytest

from luce_core.catalog import DEFAULT_MODEL, ENTRIES, Catalog, resolve_model
from luce_core.errors import UsageError


@pytest.fixture
def local(make_entry, tmp_path):
    file = tmp_path / "source.gguf"
    file.write_bytes(b"model")
    return make_entry("small", (f"file:{file}",), b"model")


def test_a_file_is_itself(tmp_path, store):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x")
    assert resolve_model(str(file), Catalog(()), store) == file


def test_a_name_is_pulled_when_missing_and_found_afterwards(local, store):
    stages = []
    catalog = Catalog.of([local])
    assert resolve_model("small", catalog, store, lambda stage, *_: stages.append(stage)) == store.path(local)
    assert stages
    stages.clear()
    assert resolve_model("small", catalog, store, lambda stage, *_: stages.append(stage)) == store.path(local)
    assert not stages


def test_a_file_wins_over_a_name(local, store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").write_bytes(b"mine")
    assert resolve_model("small", Catalog.of([local]), store).read_bytes() == b"mine"


@pytest.mark.parametrize("model", ["models/x.gguf", "x.gguf", "a/b"])
def test_a_path_that_is_not_there(model, store):
    with pytest.raises(UsageError, match=f"Model file '{model}' does not exist"):
        resolve_model(model, Catalog.of(ENTRIES), store)


def test_a_misspelt_name_is_corrected(store):
    with pytest.raises(UsageError, match="Did you mean 'smollm2-135m'"):
        resolve_model("smolm2-135m", Catalog.of(ENTRIES), store)


def test_a_strange_name_lists_the_catalogue(store):
    with pytest.raises(UsageError) as caught:
        resolve_model("zzz", Catalog.of(ENTRIES), store)
    for entry in ENTRIES:
        assert entry.name in str(caught.value)


def test_a_folder_says_what_it_holds(tmp_path, store):
    with pytest.raises(UsageError, match=r"is a folder.*no .gguf file"):
        resolve_model(str(tmp_path), Catalog(()), store)
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(UsageError, match=r"It holds a.gguf"):
        resolve_model(str(tmp_path), Catalog(()), store)


def test_two_entries_of_one_name_are_an_error_unless_equal(make_entry):
    one, two = make_entry("m", ("file:/a",), b"1"), make_entry("m", ("file:/b",), b"2")
    assert Catalog.of([one, one]).names == ("m",)
    with pytest.raises(UsageError, match=r"'m', from 'file:/a' and from 'file:/b'"):
        Catalog.of([one, two])


def test_the_default_model_is_in_the_catalogue():
    assert Catalog.of(ENTRIES).get(DEFAULT_MODEL).license == "Apache-2.0"
    with pytest.raises(UsageError, match="no model 'x' in the catalogue"):
        Catalog.of(ENTRIES).get("x")
