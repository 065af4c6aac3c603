"""Rows of a matrix that stays in its file: for tables too large for memory of which little is read at a
time.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from luce_core.errors import ModelFormatError
from luce_core.gguf.complaint import bad, quote
from luce_core.gguf.formats import Floats
from luce_core.gguf.header import TensorInfo

ROW_CACHE_BYTES: Final = 16 << 20
"""Rows of one table kept in memory, overhead included: frequent n-grams come again within a text."""
ENTRY_BYTES: Final = 272
"""What keeping a row takes beside its bytes at most: a number, a bytes object, their entry (CPython 3.11)."""


class RowReader:
    """`StoredTable`: a tensor [rows, width] read by row, with the newest rows kept as they are in the file.

    Owns a descriptor of its own, which goes with it; the file may be closed and even unlinked. One thread.
    """

    def __init__(self, path: Path, opened: int, info: TensorInfo, cache_bytes: int = ROW_CACHE_BYTES) -> None:
        """opened: a descriptor of the same file, to be sure that `path` is still that file."""
        self.name = info.name
        self.num_rows, self.width = info.shape
        self.capacity = cache_bytes // (info.row_bytes + ENTRY_BYTES)
        """Rows kept at most."""
        self._path = path
        self._info = info
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._descriptor = _reopen(path, opened)
        weakref.finalize(self, os.close, self._descriptor)
        if hasattr(os, "posix_fadvise"):  # Linux; reading ahead would fetch some 500 rows for one
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    @property
    def num_kept(self) -> int:
        """Rows in memory now."""
        return len(self._kept)

    def read(self, rows: npt.NDArray[Any]) -> Floats:
        """int[...] -> new f32[..., width]; a row named twice is read once."""
        wanted, where = np.unique(rows, return_inverse=True)  # rising: the order they lie in
        if wanted.size and not 0 <= int(wanted[0]) <= int(wanted[-1]) < self.num_rows:
            outside = int(wanted[0]) if wanted[0] < 0 else int(wanted[-1])
            raise IndexError(f"Row {outside} of tensor {self.name!r}; it has {self.num_rows}.")
        raw = b"".join([self._row(row) for row in wanted.tolist()])
        data = np.frombuffer(raw, np.uint8).reshape(wanted.size, self._info.row_bytes)
        return self._info.format.dequantize(data)[where.reshape(rows.shape)]

    def _row(self, row: int) -> bytes:
        found = self._kept.get(row)
        if found is not None:
            self._kept.move_to_end(row)
            return found
        size = self._info.row_bytes
        found = os.pread(self._descriptor, size, self._info.offset + row * size)
        if len(found) != size:
            got = f"ends within row {row}"
            raise bad(self._path, f"tensor {quote(self.name)}", got, f"all {self.num_rows} rows")
        if self.capacity:
            while len(self._kept) >= self.capacity:
                self._kept.popitem(last=False)
            self._kept[row] = found
        return found


def _reopen(path: Path, opened: int) -> int:
    """A descriptor with a position and advice of its own."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    same = os.path.sameopenfile(descriptor, opened)
    if not same:
        os.close(descriptor)
        raise ModelFormatError(f"Model file '{path}' was replaced while it was being loaded. Start again.")
    return descriptor
