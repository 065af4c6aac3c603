"""Small GGUF files for tests, written by the `gguf` package: an author independent of the reader.

    path = write_gguf(
        tmp_path / "tiny.gguf",
        {"general.architecture": "llama", "llama.block_count": 2, "tokenizer.ggml.tokens": ["a", "b"]},
        {"token_embd.weight": weights},
        quant="Q8_0",
    )

Metadata: a Python int becomes u32 (i32 if negative, 64 bits wide if it must), float f32, then bool, str,
bytes (u8 array) and lists of one kind. A numpy scalar or array keeps its own type, for files that insist on
one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np
import numpy.typing as npt

from luce_core.gguf import StringArray
from luce_core.testing.quantize import quantize

_NUMPY_TYPES = {
    "bool": gguf.GGUFValueType.BOOL,
    "uint8": gguf.GGUFValueType.UINT8, "int8": gguf.GGUFValueType.INT8,
    "uint16": gguf.GGUFValueType.UINT16, "int16": gguf.GGUFValueType.INT16,
    "uint32": gguf.GGUFValueType.UINT32, "int32": gguf.GGUFValueType.INT32,
    "uint64": gguf.GGUFValueType.UINT64, "int64": gguf.GGUFValueType.INT64,
    "float32": gguf.GGUFValueType.FLOAT32, "float64": gguf.GGUFValueType.FLOAT64,
}  # fmt: skip

_PLAIN_FORMATS = {
    "float32": "F32", "float16": "F16", "float64": "F64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip


@attrs.frozen(eq=False)
class Blocks:
    """A tensor given as finished blocks. data: `u8[..., row_bytes]` in torch order."""

    format: str
    data: npt.NDArray[np.uint8]


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any] | Blocks],
    *,
    quant: Mapping[str, str] | str | None = None,
) -> Path:
    """Write a model and return its path. `metadata` includes `general.architecture`.

    tensors: torch order; stored as their dtype says, or as `Blocks` hold them. quant: a format for every
    float tensor of two or more dimensions, or formats by name pattern (`"blk.*.attn_q.weight"`, first match
    wins; every pattern must match a tensor). Raises ValueError for anything that cannot be written exactly
    so.
    """
    path = Path(path)
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ValueError(f"metadata['general.architecture'] is {arch!r}; wanted the architecture's name")
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add_metadata(writer, key, value)
    formats = _formats(tensors, quant)
    for name, tensor in tensors.items():
        _add_tensor(writer, name, tensor, formats[name])
    _finish(writer)
    return path


def split_gguf(path: str | Path, parts: int) -> list[Path]:
    """Write the model at `path` again as `parts` files `<stem>-00001-of-0000N.gguf` beside it.

    As the usual tools do it, the first file has all metadata, the others only the `split.*` keys. `path`
    stays.
    """
    path = Path(path)
    source = gguf.GGUFReader(path)
    if not 1 <= parts <= len(source.tensors):
        raise ValueError(f"split_gguf got parts={parts}; wanted 1 to {len(source.tensors)} (its tensors)")
    shards = [path.with_name(f"{path.stem}-{part + 1:05}-of-{parts:05}.gguf") for part in range(parts)]
    bounds = [len(source.tensors) * part // parts for part in range(parts + 1)]
    for part, shard in enumerate(shards):
        writer = gguf.GGUFWriter(shard, source.fields["general.architecture"].contents())
        if part == 0:
            _copy_metadata(source, writer)
        else:
            writer.kv_data[0].clear()
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(source.tensors))
        for tensor in source.tensors[bounds[part] : bounds[part + 1]]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        _finish(writer)
    return shards


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.architecture":
        return  # the writer put it there
    if key == "general.alignment":
        writer.add_custom_alignment(int(value))
        return
    plain, kind, element = _typed(key, value)
    writer.add_key_value(key, plain, kind, element)


def _typed(key: str, value: Any) -> tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]:
    """The value as the writer wants it, its type and, for an array, its elements' type."""
    array = gguf.GGUFValueType.ARRAY
    if isinstance(value, np.ndarray):
        return value.tolist(), array, _NUMPY_TYPES[value.dtype.name]
    if isinstance(value, np.generic):
        return value.item(), _NUMPY_TYPES[value.dtype.name], None
    if isinstance(value, bytes):
        return list(value), array, gguf.GGUFValueType.UINT8
    if isinstance(value, (list, tuple, StringArray)):  # the last: what a header of ours gives back
        return list(value), array, _kind_of(key, list(value))
    return value, _kind_of(key, [value]), None


def _kind_of(key: str, values: Sequence[Any]) -> gguf.GGUFValueType:
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return gguf.GGUFValueType.BOOL
    if kinds == {str}:
        return gguf.GGUFValueType.STRING
    if kinds == {int}:
        return _int_kind(min(values), max(values))
    if kinds in ({float}, {int, float}):
        return gguf.GGUFValueType.FLOAT32
    names = sorted(kind.__name__ for kind in kinds)
    raise ValueError(f"metadata[{key!r}] has values of {names}; wanted one or more of one kind")


def _int_kind(lowest: int, highest: int) -> gguf.GGUFValueType:
    if lowest >= 0:
        return gguf.GGUFValueType.UINT32 if highest < 2**32 else gguf.GGUFValueType.UINT64
    return gguf.GGUFValueType.INT32 if lowest >= -(2**31) and highest < 2**31 else gguf.GGUFValueType.INT64


def _formats(
    tensors: Mapping[str, npt.NDArray[Any] | Blocks], quant: Mapping[str, str] | str | None
) -> dict[str, str | None]:
    """The format each tensor is to be quantized to; None keeps what it is."""
    if isinstance(quant, str):
        return {name: quant if _is_matrix(tensor) else None for name, tensor in tensors.items()}
    patterns = quant or {}
    idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in tensors)]
    if idle:
        raise ValueError(f"quant names {idle}, which match no tensor; wanted patterns of {sorted(tensors)}")
    return {name: next((patterns[p] for p in patterns if fnmatchcase(name, p)), None) for name in tensors}


def _is_matrix(tensor: npt.NDArray[Any] | Blocks) -> bool:
    return isinstance(tensor, np.ndarray) and tensor.ndim > 1 and tensor.dtype.kind == "f"


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: npt.NDArray[Any] | Blocks, target: str | None
) -> None:
    data: npt.NDArray[Any]
    if isinstance(tensor, Blocks):
        kind, data = tensor.format, tensor.data
    elif target is not None:
        kind, data = target, quantize(tensor.astype(np.float32), target)
    elif tensor.dtype.name in _PLAIN_FORMATS and tensor.ndim:
        kind, data = _PLAIN_FORMATS[tensor.dtype.name], tensor
    else:
        wanted = f"one or more dimensions of {', '.join(_PLAIN_FORMATS)}"
        raise ValueError(f"tensor {name!r} is {tensor.dtype}{list(tensor.shape)}; wanted {wanted}")
    writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=gguf.GGMLQuantizationType[kind])


def _copy_metadata(source: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for key, field in source.fields.items():
        if key.startswith("GGUF.") or re.fullmatch(r"general\.architecture|split\..*", key):
            continue
        if key == "general.alignment":
            writer.add_custom_alignment(field.contents())
            continue
        is_array = field.types[0] is gguf.GGUFValueType.ARRAY
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)
