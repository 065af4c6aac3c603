import hashlib
import multiprocessing
from pathlib import Path

import catalog_children
import pytest

from luce_core.catalog.store import Store, cache_folder, file_sha256, need_space
from luce_core.errors import DownloadError, UsageError


def test_cache_folder_order():
    home = Path.home() / ".cache" / "luce-core" / "models"
    assert cache_folder({"LUCE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/luce-core/models")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == home
    assert cache_folder({}) == home


def test_a_new_checksum_is_a_new_file(store, make_entry):
    old, new = make_entry("m", ("file:/x",), b"old"), make_entry("m", ("file:/x",), b"new")
    assert store.path(old) != store.path(new)
    assert store.work(old) != store.work(new)


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".hidden", "Big"])
def test_names_that_are_no_file_names_are_refused(store, make_entry, name):
    with pytest.raises(UsageError, match="no file name"):
        store.path(make_entry(name, ("file:/x",), b""))


def test_publish_renames_and_clears_the_work_folder(store, make_entry):
    entry = make_entry("m", ("file:/x",), b"data")
    store.work(entry).mkdir(parents=True)
    part = store.work(entry) / "model.part"
    part.write_bytes(b"data")
    assert not store.has(entry)
    assert store.publish(entry, part) == store.path(entry)
    assert store.has(entry)
    assert store.path(entry).read_bytes() == b"data"
    assert not store.work(entry).exists()


def test_remove_counts_what_it_frees(store, make_entry):
    entry = make_entry("m", ("file:/x",), b"data")
    store.work(entry).mkdir(parents=True)
    (store.work(entry) / "model.part").write_bytes(b"12")
    store.path(entry).write_bytes(b"data")
    assert store.remove(entry) == 6
    assert not store.has(entry)
    assert store.remove(entry) == 0


def test_a_second_process_waits_for_the_lock_and_is_told(store, make_entry):
    entry = make_entry("m", ("file:/x",), b"data")
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=catalog_children.hold, args=(store.root, entry, held, release))
    holder.start()
    try:
        assert held.wait(30)
        told = []

        def waiting():
            told.append(True)
            release.set()  # only now may the holder leave: so we were told while it still held

        with store.lock(entry, waiting):
            assert told == [True]
    finally:
        release.set()
        holder.join()


def test_the_lock_of_a_killed_process_is_free(store, make_entry):
    entry = make_entry("m", ("file:/x",), b"data")
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=catalog_children.hold, args=(store.root, entry, held, release))
    holder.start()
    assert held.wait(30)
    holder.kill()
    holder.join()
    with store.lock(entry, lambda: pytest.fail("a dead process still holds the lock")):
        pass


def test_checksum_of_a_file(tmp_path):
    data = bytes(range(256)) * 40_000  # more than two chunks
    file = tmp_path / "f"
    file.write_bytes(data)
    seen = []
    assert file_sha256(file, seen.append) == hashlib.sha256(data).hexdigest()
    assert sum(seen) == len(data)
    assert len(seen) > 2


def test_a_full_disk_is_said_before_anything_is_fetched(tmp_path):
    with pytest.raises(DownloadError, match=r"Model 'm' does not fit.*LUCE_CACHE"):
        need_space(tmp_path, 2**62, "m")
    need_space(tmp_path, 1, "m")


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, make_entry):
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "models")
    lock = store.lock(make_entry("m", ("file:/x",), b""), lambda: None)
    with pytest.raises(DownloadError, match=r"Cannot create the model folder .*LUCE_CACHE"), lock:
        pass
