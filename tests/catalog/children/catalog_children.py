"""What child processes of these tests run. A module by itself: a spawned child must be able to import it."""

import os

from luce_core.catalog import Store, pull
from luce_core.catalog.store import file_sha256
from luce_core.contracts import CatalogEntry


def hold(root, entry, held, release):
    """Keep the lock until told."""
    with Store(root).lock(entry, lambda: None):
        held.set()
        release.wait(30)


def pull_in_process(root, fields, answers):
    """Pull, then answer (pid, path, sha256, first stage)."""
    seen = []
    path = pull(CatalogEntry(**fields), Store(root), lambda stage, *_: seen.append(stage))
    answers.put((os.getpid(), str(path), file_sha256(path), seen[0]))


def pull_while_watched(root, fields, answers, waiting):
    """Pull, and say when it waits for somebody else's lock."""

    def note(stage, done, total):
        if stage == "waiting":
            waiting.set()

    path = pull(CatalogEntry(**fields), Store(root), note)
    answers.put((os.getpid(), str(path), file_sha256(path), "waiting"))
