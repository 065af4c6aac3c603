"""`luce-core pull`."""

from __future__ import annotations

import click

from luce_core.catalog import Store, pull
from luce_core.catalog.store import file_sha256
from luce_core.cli.console import console, megabytes, pull_progress, say, table
from luce_core.cli.flags import ModelName
from luce_core.cli.session import Session
from luce_core.contracts import CatalogEntry
from luce_core.errors import DownloadError


def make(session: Session) -> click.Command:
    """The command."""

    @click.command("pull", help="Fetch models of the catalogue; without a name, list them.")
    @click.argument("names", nargs=-1, metavar="[NAME]...", type=ModelName())
    @click.option("--verify", is_flag=True, help="Read a model that is here again and check its checksum.")
    @click.option("--remove", is_flag=True, help="Delete the named models instead.")
    def pull_models(names: tuple[str, ...], verify: bool, remove: bool) -> None:
        store = session.store(session.given)
        if not names:
            _list(session, store)
        for entry in [session.catalog.get(name) for name in names]:
            if remove:
                say(f"{entry.name}: {megabytes(store.remove(entry))} freed")
                continue
            with pull_progress(entry.name) as progress:
                path = pull(entry, store, progress)
                if verify:
                    _verify(entry, store)
            say(f"{entry.name}: {path} ({megabytes(entry.num_bytes)}, {entry.license})")

    return pull_models


def _list(session: Session, store: Store) -> None:
    rows = [
        (entry.name, megabytes(entry.num_bytes), entry.license, _where(entry, store), entry.summary)
        for entry in session.catalog
    ]
    console().print(table(["model", "size", "license", "here", "what it is"], rows, right=("size",)))
    say(f"Models are kept in {store.root}.")


def _where(entry: CatalogEntry, store: Store) -> str:
    if store.has(entry):
        return "yes"
    return "in part" if store.work(entry).is_dir() else "no"


def _verify(entry: CatalogEntry, store: Store) -> None:
    got = file_sha256(store.path(entry))
    if got != entry.sha256:
        raise DownloadError(
            f"Model {entry.name!r} has changed on the disk: {store.path(entry)} has sha256 {got}, wanted "
            f"{entry.sha256}. Delete it with 'luce-core pull --remove {entry.name}' and pull it again."
        )
