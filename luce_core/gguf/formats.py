"""Block formats: how many weights share how many bytes, and the reference that turns the bytes into numbers.

The core's table and dequantization come from the `gguf` package, which is imported at the first look-up.
Plugins add formats through `luce_register_quants`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from luce_core.contracts.plugin import QuantFormat
from luce_core.errors import ModelFormatError, PluginError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

DEQUANT_CHUNK_BLOCKS: Final = 8_192
"""Blocks decoded at a time: keeps what the decoders allocate on the way small beside the result."""

REMOVED: Final = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
"""Type ids GGML once used and gave up."""


@attrs.frozen
class BlockFormat:
    """A way to store weights: blocks of `block_weights` weights in `block_bytes` bytes.

    decode: blocks `u8[n, block_bytes]` (C-contiguous, not to be changed) -> `f32[n, block_weights]`.
    """

    name: str
    ggml_id: int
    block_weights: int = attrs.field(validator=attrs.validators.ge(1))
    block_bytes: int = attrs.field(validator=attrs.validators.ge(1))
    decode: Callable[[Bytes], Floats] = attrs.field(repr=False)

    def row_bytes(self, row_weights: int) -> int:
        """Bytes of one row; `row_weights` is a multiple of `block_weights`."""
        assert row_weights % self.block_weights == 0, (self.name, row_weights)
        return row_weights // self.block_weights * self.block_bytes

    def dequantize(self, raw: Bytes) -> Floats:
        """`u8[..., row_bytes]` -> new `f32[..., row_weights]`. Any bits decode, some to NaN or infinity."""
        if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % self.block_bytes:
            raise ValueError(
                f"{self.name}.dequantize got {raw.dtype}{list(raw.shape)}; wanted uint8 with rows of a "
                f"multiple of {self.block_bytes} bytes"
            )
        blocks = raw.reshape(-1, self.block_bytes)
        out = np.empty((len(blocks), self.block_weights), np.float32)
        with np.errstate(all="ignore"):
            for start in range(0, len(blocks), DEQUANT_CHUNK_BLOCKS):
                chunk = slice(start, start + DEQUANT_CHUNK_BLOCKS)
                decoded = self.decode(blocks[chunk])
                if decoded.shape != out[chunk].shape:
                    raise PluginError(
                        f"Block format {self.name!r} decoded {list(blocks[chunk].shape)} bytes to the shape "
                        f"{list(decoded.shape)}; wanted {list(out[chunk].shape)}. Report it to its author."
                    )
                out[chunk] = decoded
        return out.reshape(*raw.shape[:-1], raw.shape[-1] // self.block_bytes * self.block_weights)


def declared(quant: QuantFormat, resolve: Callable[[str], Callable[..., Any]]) -> BlockFormat:
    """The format a plugin declares. `resolve` imports its "module:fn" when something is first dequantized."""
    decode = _Declared(quant.dequantize, resolve)
    return BlockFormat(quant.name, quant.ggml_id, quant.block_weights, quant.block_bytes, decode)


class FormatRegistry:
    """Formats by GGUF type id and by name. Filled at start-up, read-only afterwards."""

    def __init__(self) -> None:
        self._by_id: dict[int, BlockFormat] = {}
        self._by_name: dict[str, BlockFormat] = {}
        self._core_loaded = False

    def by_id(self, ggml_id: int) -> BlockFormat:
        """Raises ModelFormatError for an id nothing here can read."""
        self._load_core()
        if ggml_id in self._by_id:
            return self._by_id[ggml_id]
        if ggml_id in REMOVED:
            raise ModelFormatError(
                f"type id {ggml_id} ({REMOVED[ggml_id]}), which GGML no longer has; wanted a current type. "
                "Fetch the model in another quantization."
            )
        raise ModelFormatError(
            f"unknown type id {ggml_id}; wanted one of {', '.join(self._by_name)}. "
            "Install the plugin that brings this format, or fetch the model in another quantization."
        )

    def by_name(self, name: str) -> BlockFormat:
        """Raises ModelFormatError for a name nothing here can read."""
        self._load_core()
        if name not in self._by_name:
            known = ", ".join(self._by_name)
            raise ModelFormatError(f"Block format {name!r} is unknown; wanted one of {known}.")
        return self._by_name[name]

    def register(self, block_format: BlockFormat) -> None:
        """Add a plugin's format. Raises PluginError if the id or the name is taken by another one."""
        self._load_core()
        self._add(block_format)

    def __iter__(self) -> Iterator[BlockFormat]:
        self._load_core()
        return iter(tuple(self._by_id.values()))

    def _add(self, new: BlockFormat) -> None:
        for old in (self._by_id.get(new.ggml_id), self._by_name.get(new.name)):
            if old is not None and old != new:
                raise PluginError(
                    f"Block format {new.name!r} (type id {new.ggml_id}) clashes with {old.name!r} (type id "
                    f"{old.ggml_id}). Uninstall one of the plugins that bring them."
                )
        self._by_id[new.ggml_id] = self._by_name[new.name] = new

    def _load_core(self) -> None:
        if not self._core_loaded:
            for block_format in _core_formats():
                self._add(block_format)
            self._core_loaded = True


FORMATS: Final = FormatRegistry()
"""The process-wide registry the reader uses."""


def _core_formats() -> Iterable[BlockFormat]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for kind in GGMLQuantizationType:
        weights, num_bytes = GGML_QUANT_SIZES[kind]
        decode = _OWN_DECODERS.get(kind.name) or _FromPackage(kind.name)
        yield BlockFormat(kind.name, int(kind), weights, num_bytes, decode)


# Decoders that need to know something are values, no closures: formats compare and headers pickle.


@attrs.frozen
class _Declared:
    """A plugin's function, imported when it is needed."""

    factory: str
    resolve: Callable[[str], Callable[..., Any]]

    def __call__(self, blocks: Bytes) -> Floats:
        decoded: Floats = self.resolve(self.factory)(blocks)
        return decoded


@attrs.frozen
class _Plain:
    """Numbers stored as they are, little-endian; 64-bit ones are rounded to float32."""

    dtype: str

    def __call__(self, blocks: Bytes) -> Floats:
        return blocks.view(self.dtype).astype(np.float32)


@attrs.frozen
class _FromPackage:
    """The `gguf` package's dequantization of the format `name`."""

    name: str

    def __call__(self, blocks: Bytes) -> Floats:
        from gguf import GGMLQuantizationType, dequantize

        try:
            # One long row: the package walks rows in groups of 16, which is slow for narrow tensors.
            flat = dequantize(blocks.reshape(1, -1), GGMLQuantizationType[self.name])
        except NotImplementedError as error:
            raise ModelFormatError(
                f"Block format {self.name!r} has no dequantization: it is a scratch format of GGML kernels, "
                "or too new for the installed gguf package. Upgrade gguf, or fetch another quantization."
            ) from error
        return np.asarray(flat, np.float32).reshape(len(blocks), -1)


def _decode_q1_0(blocks: Bytes) -> Floats:
    """Block: scale f16, then a sign bit per weight, lowest bit first; a set bit is +scale."""
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return np.where(signs == 1, scale, -scale)


def _decode_q8_k(blocks: Bytes) -> Floats:
    """Block: scale f32, 256 weights i8, then sums that only matter to kernels."""
    scale = blocks[:, :4].copy().view("<f4")
    return scale * blocks[:, 4:260].view(np.int8).astype(np.float32)


_PLAIN_DTYPES: Final = {
    "F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
_OWN_DECODERS: Final[dict[str, Callable[[Bytes], Floats]]] = {
    **{name: _Plain(dtype) for name, dtype in _PLAIN_DTYPES.items()},
    "Q1_0": _decode_q1_0,
    "Q8_K": _decode_q8_k,
}
