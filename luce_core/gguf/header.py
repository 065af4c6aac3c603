"""The header of a model, and reads from it that say what is wrong with which key."""

from __future__ import annotations

import builtins
import enum
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, overload

import attrs
import numpy as np

from luce_core.errors import ModelFormatError
from luce_core.gguf.complaint import RECONVERT, bad, quote
from luce_core.gguf.formats import BlockFormat
from luce_core.gguf.values import MetaValue, StringArray, is_int, shown

U32_MAX: Final = 2**32
CLIP: Final = "clip"
"""The architecture of projector files: encoders of images and sound that go with another file."""
PROJECTOR_TYPES: Final = ("clip.projector_type", "clip.vision.projector_type")


class _Required(enum.Enum):
    REQUIRED = enum.auto()


REQUIRED: Final = _Required.REQUIRED
"""The default of a read that has none: the key must be there."""

Text: TypeAlias = builtins.str  # the class below has reads named like the types they return
_Bool: TypeAlias = builtins.bool
D = TypeVar("D")


@attrs.frozen
class TensorInfo:
    """Where a tensor lies and what it is.

    shape: torch order, outermost first. offset: its first byte, counted from the start of its file. shard:
    index of that file.
    """

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    num_bytes: int
    shard: int
    offset: int

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.format.row_bytes(self.shape[-1])


@attrs.frozen(eq=False)
class GgufHeader:
    """All a GGUF model says about itself, without its weights. Plain data; holds no file open.

    path: the file that was opened; shards: every file of the model, `path` first. metadata: by key, of the
    first file; arrays of numbers are read-only numpy arrays, of strings a `StringArray`. tensors: of all
    files, in file order.

    The typed reads take a key in which `{a}` stands for the architecture (`"{a}.block_count"`). They raise
    ModelFormatError if the key is missing and no default was given, or if its value has the wrong type or
    range. A default is returned as it is.
    """

    path: Path
    version: int
    metadata: Mapping[str, MetaValue]
    tensors: Mapping[str, TensorInfo]
    shards: tuple[Path, ...]

    @property
    def arch(self) -> Text:
        """`general.architecture`."""
        return self.str("general.architecture")

    @property
    def family(self) -> Text:
        """What finds the plugin that serves the file: `arch`, or "clip.TYPE" for projector files, which are
        all of architecture "clip".
        """
        if self.arch != CLIP:
            return self.arch
        own = next((key for key in PROJECTOR_TYPES if key in self.metadata), PROJECTOR_TYPES[0])
        return f"{CLIP}.{self.str(own)}"

    def key(self, key: Text) -> Text:
        """The key with `{a}` replaced by the architecture."""
        return key.replace("{a}", self.arch) if "{a}" in key else key

    def has(self, key: Text) -> _Bool:
        return self.key(key) in self.metadata

    @overload
    def uint(self, key: Text, *, low: int = 0, high: int = U32_MAX) -> int: ...
    @overload
    def uint(self, key: Text, default: D, *, low: int = 0, high: int = U32_MAX) -> int | D: ...
    def uint(self, key: Text, default: object = REQUIRED, *, low: int = 0, high: int = U32_MAX) -> object:
        """An integer from `low` to `high`, both included."""
        wanted = f"an integer from {low} to {high}"
        return self._read(key, default, wanted, lambda value: _int_between(value, low, high))

    @overload
    def float(self, key: Text) -> builtins.float: ...
    @overload
    def float(self, key: Text, default: D) -> builtins.float | D: ...
    def float(self, key: Text, default: object = REQUIRED) -> object:
        """A finite number; an integer is taken as one."""
        return self._read(key, default, "a finite number", _finite)

    @overload
    def bool(self, key: Text) -> _Bool: ...
    @overload
    def bool(self, key: Text, default: D) -> _Bool | D: ...
    def bool(self, key: Text, default: object = REQUIRED) -> object:
        return self._read(key, default, "a boolean", lambda v: v if isinstance(v, _Bool) else None)

    @overload
    def str(self, key: Text) -> Text: ...
    @overload
    def str(self, key: Text, default: D) -> Text | D: ...
    def str(self, key: Text, default: object = REQUIRED) -> object:
        return self._read(key, default, "a string", lambda v: v if isinstance(v, Text) else None)

    @overload
    def strings(self, key: Text) -> tuple[Text, ...]: ...
    @overload
    def strings(self, key: Text, default: D) -> tuple[Text, ...] | D: ...
    def strings(self, key: Text, default: object = REQUIRED) -> object:
        return self._read(key, default, "an array of strings", _strings)

    @overload
    def uints(self, key: Text, *, low: int = 0, high: int = U32_MAX) -> tuple[int, ...]: ...
    @overload
    def uints(self, key: Text, default: D, *, low: int = 0, high: int = U32_MAX) -> tuple[int, ...] | D: ...
    def uints(self, key: Text, default: object = REQUIRED, *, low: int = 0, high: int = U32_MAX) -> object:
        """An array of integers from `low` to `high`, both included."""
        wanted = f"an array of integers from {low} to {high}"
        return self._read(key, default, wanted, lambda value: _ints_between(value, low, high))

    @overload
    def floats(self, key: Text) -> tuple[builtins.float, ...]: ...
    @overload
    def floats(self, key: Text, default: D) -> tuple[builtins.float, ...] | D: ...
    def floats(self, key: Text, default: object = REQUIRED) -> object:
        """An array of finite numbers."""
        return self._read(key, default, "an array of finite numbers", _finites)

    @overload
    def bools(self, key: Text) -> tuple[_Bool, ...]: ...
    @overload
    def bools(self, key: Text, default: D) -> tuple[_Bool, ...] | D: ...
    def bools(self, key: Text, default: object = REQUIRED) -> object:
        return self._read(key, default, "an array of booleans", _bools)

    @overload
    def per_layer_uint(
        self, key: Text, num_layers: int, *, low: int = 0, high: int = U32_MAX
    ) -> tuple[int, ...]: ...
    @overload
    def per_layer_uint(
        self, key: Text, num_layers: int, default: int, *, low: int = 0, high: int = U32_MAX
    ) -> tuple[int, ...]: ...
    def per_layer_uint(
        self,
        key: Text,
        num_layers: int,
        default: int | Literal[_Required.REQUIRED] = REQUIRED,
        *,
        low: int = 0,
        high: int = U32_MAX,
    ) -> tuple[int, ...]:
        """One integer per layer: the file has an array of `num_layers`, or one integer for all."""

        def check(value: MetaValue) -> tuple[int, ...] | None:
            same = _int_between(value, low, high)
            if same is not None:
                return (same,) * num_layers
            each = _ints_between(value, low, high)
            return each if each is not None and len(each) == num_layers else None

        wanted = f"an integer from {low} to {high}, or an array of {num_layers} of them"
        fallback = default if default is REQUIRED else (default,) * num_layers
        value: tuple[int, ...] = self._read(key, fallback, wanted, check)
        return value

    def tensor(self, name: Text, shape: tuple[int, ...] | None = None) -> TensorInfo:
        """The tensor's record. Raises ModelFormatError if it is missing or not of `shape` (torch order)."""
        if name not in self.tensors:
            raise bad(self.path, f"tensor {quote(name)}", "is missing", "a tensor of that name", RECONVERT)
        info = self.tensors[name]
        if shape is not None and info.shape != tuple(shape):
            got = f"has the shape {list(info.shape)}"
            wanted = f"{list(shape)} (outermost dimension first)"
            raise bad(self.path, f"tensor {quote(name)}", got, wanted, RECONVERT)
        return info

    def _read(self, key: Text, default: object, wanted: Text, check: Callable[[MetaValue], object]) -> Any:
        key = self.key(key)
        if key not in self.metadata:
            if default is not REQUIRED:
                return default
            raise self._bad_key(key, "is missing", wanted)
        value = check(self.metadata[key])
        if value is None:
            raise self._bad_key(key, f"is {shown(self.metadata[key])}", wanted)
        return value

    def _bad_key(self, key: Text, got: Text, wanted: Text) -> ModelFormatError:
        return bad(self.path, f"metadata key {quote(key)}", got, wanted, RECONVERT)


def _int_between(value: MetaValue, low: int, high: int) -> int | None:
    return value if is_int(value) and low <= value <= high else None


def _finite(value: MetaValue) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _strings(value: MetaValue) -> tuple[str, ...] | None:
    return tuple(value) if isinstance(value, StringArray) else _if_empty(value)


def _ints_between(value: MetaValue, low: int, high: int) -> tuple[int, ...] | None:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        return _if_empty(value)
    if value.size and not (low <= int(value.min()) and int(value.max()) <= high):
        return None
    return tuple(value.tolist())


def _finites(value: MetaValue) -> tuple[float, ...] | None:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        return _if_empty(value)
    return tuple(value.astype(np.float64).tolist()) if np.isfinite(value).all() else None


def _bools(value: MetaValue) -> tuple[bool, ...] | None:
    if not isinstance(value, np.ndarray) or value.dtype.kind != "b":
        return _if_empty(value)
    return tuple(value.tolist())


def _if_empty(value: MetaValue) -> tuple[()] | None:
    """An array without elements serves as an array of any type: some writers give it an arbitrary one."""
    return () if isinstance(value, (StringArray, np.ndarray, tuple)) and len(value) == 0 else None
