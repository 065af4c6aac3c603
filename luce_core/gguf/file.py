"""A GGUF model on disk, in one file or split into several, mapped into memory read-only."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import attrs
import numpy as np

from luce_core.errors import ModelFormatError
from luce_core.gguf import limits
from luce_core.gguf.complaint import bad, quote
from luce_core.gguf.formats import FORMATS, Bytes, Floats, FormatRegistry
from luce_core.gguf.header import GgufHeader, TensorInfo
from luce_core.gguf.parse import ShardTable, parse_table
from luce_core.gguf.rows import RowReader
from luce_core.gguf.values import is_int, shown

SHARD_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
SAMPLE_BYTES: Final = 256
HASH_CHUNK_BYTES: Final = 1 << 20


class GgufFile:
    """An open model. Arrays from `raw` stay valid after `close`: they keep their part mapped.

    Weights are not read until they are touched. Do not shorten or overwrite the files while they are open:
    the operating system ends a process that touches a page that is gone.
    """

    def __init__(self, header: GgufHeader, shards: tuple[_Shard, ...]) -> None:
        self.header = header
        self._shards = shards
        self._identity: str | None = None

    @classmethod
    def open(cls, path: str | Path, formats: FormatRegistry = FORMATS) -> Self:
        """Open `path`, and the rest of its set if it is the first file of a split model.

        Raises ModelFormatError if a file is missing, unreadable or wrong in any way.
        """
        path = Path(path)
        with ExitStack() as opened:
            first = _open_shard(path, 0, formats, opened)
            shards = [first]
            for index, other in enumerate(_other_shards(path, first.table), start=1):
                shards.append(_open_shard(other, index, formats, opened))
                _check_member(first.table, shards[-1], index)
            header = _join(shards)
            opened.pop_all()
            return cls(header, tuple(shards))

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes as the file has them: read-only `u8[..., row_bytes]` in torch order, no copy."""
        info = self.header.tensor(name)
        flat = np.frombuffer(self._shard(info).map, np.uint8, info.num_bytes, info.offset)
        return flat.reshape(*info.shape[:-1], info.row_bytes)

    def dequantize(self, name: str) -> Floats:
        """The tensor's numbers: a new `f32[...]` in torch order."""
        return self.header.tensor(name).format.dequantize(self.raw(name))

    def rows(self, name: str) -> RowReader:
        """The matrix `name`, to be read by row for as long as the reader lives; nothing of it is mapped."""
        info = self.header.tensor(name)
        if len(info.shape) != 2:
            got = f"has the shape {list(info.shape)}"
            raise bad(self.header.path, f"tensor {quote(name)}", got, "two dimensions")
        shard = self._shard(info)
        return RowReader(shard.path, shard.descriptor, info)

    def identity(self) -> str:
        """Hash of the model's content: 32 hex digits, the same wherever the files lie.

        Covers every header byte (all metadata, the tensor table), the file sizes and 256 bytes from the
        middle of each tensor, so it reads a few megabytes of a model of any size. Two files that differ
        only in other weights share an identity; another quantization, a merge or an edit of a whole tensor
        does not escape it.
        """
        if self._identity is None:
            digest = hashlib.sha256()
            for shard in self._shards:
                _hash_header(digest, shard)
            for info in self.header.tensors.values():
                num_bytes = min(SAMPLE_BYTES, info.num_bytes)
                middle = info.offset + (info.num_bytes - num_bytes) // 2
                digest.update(os.pread(self._shard(info).descriptor, num_bytes, middle))
            self._identity = digest.hexdigest()[:32]
        return self._identity

    def close(self) -> None:
        """Give the files back. What an array of `raw` still sees is unmapped when the last one goes."""
        for shard in self._shards:
            os.close(shard.descriptor)
        self._shards = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shard(self, info: TensorInfo) -> _Shard:
        if not self._shards:
            raise ValueError(f"GGUF file '{self.header.path}' is closed.")
        return self._shards[info.shard]


def read_header(path: str | Path, formats: FormatRegistry = FORMATS) -> GgufHeader:
    """Only the header of a model and, if it is split, of its other files. Raises like `GgufFile.open`."""
    with GgufFile.open(path, formats) as file:
        return file.header


@attrs.frozen(eq=False)
class _Shard:
    """One open file. descriptor: ours to close; map: lives as long as anything looks into it."""

    path: Path
    descriptor: int
    map: mmap.mmap
    table: ShardTable


def _open_shard(path: Path, index: int, formats: FormatRegistry, opened: ExitStack) -> _Shard:
    """Map a file and read its table; `opened` closes it again."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    opened.callback(os.close, descriptor)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable(path, "it is not a regular file")
    if not status.st_size:
        raise bad(path, "the file", "is empty", "a GGUF model")
    try:
        mapped = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    except (OSError, ValueError, OverflowError) as error:
        raise _unreadable(path, f"mapping its {status.st_size} bytes failed: {error}") from error
    return _Shard(path, descriptor, mapped, parse_table(memoryview(mapped), path, index, formats))


def _unreadable(path: Path, why: str) -> ModelFormatError:
    return ModelFormatError(f"GGUF file '{path}' cannot be read: {why}. Check the path and its permissions.")


def _other_shards(path: Path, table: ShardTable) -> list[Path]:
    """The second to last file of a split model whose first is `path`; empty if it is not split."""
    count = _split_uint(table, SPLIT_COUNT, path, default=1)
    if not 1 <= count <= limits.MAX_SHARDS:
        raise bad(path, f"metadata key '{SPLIT_COUNT}'", f"is {count}", f"1 to {limits.MAX_SHARDS}")
    if count == 1:
        return []
    name = SHARD_NAME.fullmatch(path.name)
    number = _split_uint(table, SPLIT_NO, path) + 1
    if name is None or (int(name["number"]), int(name["count"])) != (number, count):
        wanted = f"a name that ends in -{number:05}-of-{count:05}.gguf, as its metadata has it"
        fix = "Give the files of the set their names back."
        raise bad(path, "the file name", f"is {quote(path.name)}", wanted, fix)
    stem = name["stem"]
    siblings = [path.with_name(f"{stem}-{place:05}-of-{count:05}.gguf") for place in range(1, count + 1)]
    if number != 1:
        got = f"is number {number} of {count}"
        raise bad(path, "this file of a split model", got, "the first", f"Open '{siblings[0]}' instead.")
    missing = [other.name for other in siblings[1:] if not other.exists()]
    if missing:
        listed = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        got = f"lacks {len(missing)} of its {count} files: {listed}"
        raise bad(path, "the split model", got, "all of them beside the first", "Fetch the missing files.")
    return siblings[1:]


def _split_uint(table: ShardTable, key: str, path: Path, default: int | None = None) -> int:
    value = table.metadata.get(key, default)
    if is_int(value) and value >= 0:
        return value
    got = "is missing" if value is None else f"is {shown(value)}"
    raise bad(path, f"metadata key '{key}'", got, "a non-negative integer")


def _check_member(first: ShardTable, shard: _Shard, index: int) -> None:
    """A later file must agree with the first about the set, and be where its name says."""
    count = first.metadata[SPLIT_COUNT]
    for key, wanted in ((SPLIT_NO, index), (SPLIT_COUNT, count)):
        got = _split_uint(shard.table, key, shard.path)
        if got != wanted:
            fix = "Fetch the file again: it belongs to another set or place."
            raise bad(shard.path, f"metadata key '{key}'", f"is {got}", f"{wanted}", fix)


def _join(shards: list[_Shard]) -> GgufHeader:
    first = shards[0]
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in shard.table.tensors.items():
            if name in tensors:
                got = f"is also in {quote(shards[tensors[name].shard].path.name)}"
                raise bad(shard.path, f"tensor {quote(name)}", got, "every name once in the set")
            tensors[name] = info
    if len(tensors) > limits.MAX_TENSORS:
        got = f"has {len(tensors)} tensors"
        raise bad(first.path, "the split model", got, f"at most {limits.MAX_TENSORS}")
    for shard in shards if len(shards) > 1 else ():
        expected = _split_uint(shard.table, SPLIT_TENSORS, shard.path, default=len(tensors))
        if expected != len(tensors):
            wanted = f"{len(tensors)}, as many as the files hold"
            raise bad(shard.path, f"metadata key '{SPLIT_TENSORS}'", f"is {expected}", wanted)
    paths = tuple(shard.path for shard in shards)
    return GgufHeader(first.path, first.table.version, first.table.metadata, tensors, paths)


def _hash_header(digest: hashlib._Hash, shard: _Shard) -> None:
    digest.update(len(shard.map).to_bytes(8, "little"))
    for start in range(0, shard.table.header_bytes, HASH_CHUNK_BYTES):
        digest.update(shard.map[start : min(start + HASH_CHUNK_BYTES, shard.table.header_bytes)])
