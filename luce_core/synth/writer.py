"""Writes the file, or its shards; nothing has its name before it is whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from attrs import frozen

from luce_core.contracts import Geometry
from luce_core.errors import CapacityError, UsageError
from luce_core.gguf.emit import Placed, header_bytes, place
from luce_core.gguf.formats import FORMATS, BlockFormat
from luce_core.option_fields import show_size
from luce_core.plugins import discover
from luce_core.synth.blocks import Pools, distinct, uniform
from luce_core.synth.known import find
from luce_core.synth.mixture import file_type, formats_of, num_dims
from luce_core.synth.vocabulary import vocabulary

Progress = Callable[[int, int], None]
"""(bytes written, bytes in all); called every few megabytes."""

MAX_SHARDS: Final = 1_024
NEAR_ONE: Final = (0.9, 1.1)
SMALL: Final = (-0.1, 0.1)
SUFFIX: Final = ".gguf"


def silent(_done: int, _total: int) -> None:
    """The progress nobody watches."""


@frozen
class Shard:
    """One file to be written."""

    path: Path
    head: bytes
    tensors: tuple[Placed, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return len(self.head) + sum(tensor.padded_bytes for tensor in self.tensors)


def write(
    geometry: Geometry | str,
    quant: str,
    path: str | Path,
    *,
    seed: int = 0,
    header_only: bool = False,
    tokenizer: bool = True,
    shards: int = 1,
    shard_bytes: int = 0,
    overwrite: bool = False,
    progress: Progress = silent,
) -> list[Path]:
    """Write a model of random weights and return its files, the one to open first.

    geometry: a name an installed plugin knows, or one made by hand. header_only: the weights are a hole in
    the disk, all zero. shards: so many files of about one size; shard_bytes: as many as it takes, none with
    more tensor data (but for a tensor that is larger). The same arguments give the same bytes. Raises
    UsageError, and CapacityError where the disk has no room; whatever happens, no part of a file is left.
    """
    if isinstance(geometry, str):
        geometry = find(discover(), geometry)
    planned = plan_shards(
        geometry, quant, Path(path), tokenizer=tokenizer, shards=shards, shard_bytes=shard_bytes
    )
    _check_target(planned, overwrite=overwrite)
    if not header_only:
        _check_room(planned)
    filler = None if header_only else Filler(geometry, seed, planned)
    try:
        _write_all(planned, filler, progress)
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} could not be written: {error.strerror or error}. Nothing of it was left; choose "
            "another folder or make room."
        ) from error
    return [shard.path for shard in planned]


def plan_shards(
    geometry: Geometry,
    quant: str,
    path: Path,
    *,
    tokenizer: bool = True,
    shards: int = 1,
    shard_bytes: int = 0,
) -> list[Shard]:
    """What `write` would write. Raises UsageError."""
    if path.suffix != SUFFIX:
        raise UsageError(f"The file is to be called {path.name!r}; wanted a name that ends in {SUFFIX}.")
    formats = {name: FORMATS.by_name(one) for name, one in formats_of(geometry, quant).items()}
    tensors = place(geometry.shapes, formats)
    cuts = _cuts(tensors, shards, shard_bytes)
    metadata = {
        **geometry.metadata,
        "general.name": f"{geometry.name} with random weights",
        "general.file_type": file_type(quant),
        **(vocabulary(geometry.vocab) if tokenizer else {}),
    }
    if len(cuts) == 1:
        return [_shard(path, metadata, cuts[0], formats)]
    made = []
    for number, names in enumerate(cuts):
        own = metadata if number == 0 else {"general.architecture": geometry.arch}
        split = {
            "split.no": np.uint16(number),
            "split.count": np.uint16(len(cuts)),
            "split.tensors.count": np.int32(len(tensors)),
        }
        one = path.with_name(f"{path.stem}-{number + 1:05}-of-{len(cuts):05}{SUFFIX}")
        made.append(_shard(one, {**own, **split}, names, formats))
    return made


def _shard(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[Placed], formats: Mapping[str, BlockFormat]
) -> Shard:
    placed = place({tensor.name: tensor.shape for tensor in tensors}, formats)
    return Shard(path, header_bytes(metadata, placed), tuple(placed))


def _cuts(tensors: Sequence[Placed], shards: int, shard_bytes: int) -> list[list[Placed]]:
    """The tensors of each file, in order."""
    if shards != 1 and shard_bytes:
        raise UsageError("Both the number of shards and their size were given. Give one of them.")
    if not 1 <= shards <= min(len(tensors), MAX_SHARDS):
        raise UsageError(f"{shards} shards were asked for; wanted 1 to {min(len(tensors), MAX_SHARDS)}.")
    total = sum(tensor.padded_bytes for tensor in tensors)
    cuts: list[list[Placed]] = [[]]
    for index, tensor in enumerate(tensors):
        end = tensor.offset + tensor.num_bytes
        if shard_bytes:
            full = bool(cuts[-1]) and end - cuts[-1][0].offset > shard_bytes
        else:
            # Cut where the share is reached, and where only as many tensors are left as files.
            reached = tensor.offset * shards >= total * len(cuts)
            full = bool(cuts[-1]) and (reached or len(tensors) - index <= shards - len(cuts))
            full = full and len(cuts) < shards
        if full:
            cuts.append([])
        cuts[-1].append(tensor)
    if len(cuts) > MAX_SHARDS:
        raise UsageError(
            f"Shards of {show_size(shard_bytes)} would be {len(cuts)} files; wanted at most {MAX_SHARDS}."
        )
    return cuts


# --- files


def _check_target(planned: Sequence[Shard], *, overwrite: bool) -> None:
    folder = planned[0].path.parent
    if not folder.is_dir():
        raise UsageError(f"The folder {str(folder)!r} is not there. Make it first.")
    there = [shard.path for shard in planned if shard.path.exists()]
    if there and not overwrite:
        raise UsageError(
            f"{str(there[0])!r} is there already. Choose another name, or overwrite it with --force."
        )


def _check_room(planned: Sequence[Shard]) -> None:
    folder = planned[0].path.parent
    needed, free = sum(shard.num_bytes for shard in planned), shutil.disk_usage(folder).free
    if free < needed:
        raise CapacityError(
            f"The model does not fit on the disk: {str(folder)!r} has {show_size(free)} free, it takes "
            f"{show_size(needed)}. Free some room, choose another folder or a smaller quantization."
        )


def _write_all(planned: Sequence[Shard], filler: Filler | None, progress: Progress) -> None:
    """Every file under a passing name, then all of them under their own, the first one last."""
    total, done = sum(shard.num_bytes for shard in planned), 0
    with ExitStack() as cleanup:
        parts = []
        for shard in planned:
            part = _passing_file(shard.path)
            cleanup.callback(part.path.unlink, missing_ok=True)
            cleanup.callback(part.file.close)
            parts.append(part)
            for piece in _pieces(shard, filler, part.file):
                done += piece
                progress(done, total)
            part.file.flush()
            os.fsync(part.file.fileno())
            part.file.close()
        for shard, part in reversed(list(zip(planned, parts, strict=True))):
            part.path.replace(shard.path)


@frozen(eq=False)
class _Passing:
    path: Path
    file: IO[bytes]


def _passing_file(path: Path) -> _Passing:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.fchmod(descriptor, 0o666 & ~_umask())
    return _Passing(Path(name), os.fdopen(descriptor, "wb", buffering=0))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _pieces(shard: Shard, filler: Filler | None, file: IO[bytes]) -> Iterator[int]:
    """Writes the file; yields bytes as they were written."""
    yield _put(file, memoryview(shard.head))
    if filler is None:
        file.truncate(shard.num_bytes)
        yield shard.num_bytes - len(shard.head)
        return
    for tensor in shard.tensors:
        for piece in filler.fill(tensor):
            yield _put(file, piece)
        if padding := tensor.padded_bytes - tensor.num_bytes:
            yield _put(file, memoryview(bytes(padding)))


def _put(file: IO[bytes], piece: memoryview) -> int:
    """Unbuffered writes may be short."""
    left = piece
    while left:
        left = left[file.write(left) :]
    return len(piece)


# --- weights


class Filler:
    """What stands in each tensor."""

    def __init__(self, geometry: Geometry, seed: int, planned: Sequence[Shard]) -> None:
        needed = Counter[str]()
        for shard in planned:
            for tensor in shard.tensors:
                needed[tensor.format.name] += tensor.num_bytes // tensor.format.block_bytes
        self._geometry = geometry
        self._seed = seed
        self._pools = Pools(seed, needed)

    def fill(self, tensor: Placed) -> Iterator[memoryview]:
        """The tensor's bytes, in pieces."""
        span = self._range(tensor)
        if span is None:
            yield from self._pools.cut(tensor.name, tensor.format, tensor.shape[-1], tensor.num_bytes)
        elif tensor.format.name == "I32":
            low, high = map(int, span)
            rows = distinct(self._seed, tensor.name, prod(tensor.shape[:-1]), tensor.shape[-1], low, high)
            yield rows.astype("<i4").reshape(-1).view(np.uint8).data
        else:
            values = uniform(self._seed, tensor.name, prod(tensor.shape), *span)
            yield values.astype("<f4").view(np.uint8).data

    def _range(self, tensor: Placed) -> tuple[float, float] | None:
        """Of the values of a tensor that is no matrix, or that its geometry has a word on."""
        name = tensor.name
        if tensor.format.name not in ("F32", "I32"):
            return None
        found = next((span for p, span in self._geometry.ranges.items() if fnmatchcase(name, p)), None)
        if found is not None:
            return found
        if num_dims(tensor.shape) > 1:
            return None
        return NEAR_ONE if name.endswith(("norm.weight", ".scale", "_scale.weight")) else SMALL
