"""Hyper-parameters of DeepSeek V4.1. Torch-free.

Few layers compress: what they make is read by them and by those after them, up to the next that compresses.
Who makes and who picks is said by the tensors a layer has; keys say nothing of it.
"""

from __future__ import annotations

from attrs import asdict, frozen

from luce_arch_deepseek4.engram import EngramParams, read_engram
from luce_arch_deepseek4.params import (
    ExpertLayer,
    IndexerParams,
    TrunkParams,
    read_indexer,
    read_layers,
    read_trunk,
)
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import MAX_LAYERS, MAX_WIDTH, bad_key

CANDIDATES = "{a}.attention.indexer.candidate_"
BLOCKS, BLOCK_ENTRIES = 2048, 8
"""Of published models, whose files do not say it."""
DRAFTING = (".nextn.", ".dspark", ".mtp.")
"""In the names of tensors of blocks that predict further tokens."""


@frozen
class CandidateParams:
    """The first level of the indexer: later layers pick among the entries of blocks one layer chose."""

    layer: int
    blocks: int
    entries: int
    """Of a block."""


@frozen
class SharedLayer(ExpertLayer):
    """A layer of V4.1."""

    source: int | None
    """The layer whose entries it attends to; its own number: it makes them. None: it has its window alone."""
    indexes: bool
    """Picks entries; others take what was picked last."""

    @property
    def compresses(self) -> bool:
        return self.source == self.number


@frozen
class SharedParams(TrunkParams):
    """What `describe` leaves for `build`."""

    indexer: IndexerParams | None
    """None: no layer compresses."""
    candidates: CandidateParams | None
    engram: EngramParams | None
    layers: tuple[SharedLayer, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def read_shared_params(header: GgufHeader) -> SharedParams:
    """Read and check the keys. Raises ModelFormatError naming the key."""
    trunk = read_trunk(header)
    total = header.uint("{a}.block_count", low=1, high=MAX_LAYERS)
    layers = _layers(header, read_layers(header, total - _num_drafting(header, total), total))
    far = any(layer.source is not None for layer in layers)
    return SharedParams(
        **asdict(trunk, recurse=False),
        indexer=read_indexer(header, trunk.attention) if far else None,
        candidates=_candidates(header, layers),
        engram=read_engram(header, trunk.vocab, len(layers)),
        layers=layers,
    )


def _num_drafting(header: GgufHeader, total: int) -> int:
    """Blocks behind the trunk that predict further tokens; a file may count them without holding them."""
    count = header.uint("{a}.nextn_predict_layers", 0, high=total - 1)
    behind = [f"blk.{number}." for number in range(total - count, total)]
    if all(f"{blk}attn_norm.weight" not in header.tensors for blk in behind):
        return count
    held = [name for name in header.tensors if name.startswith(tuple(behind))]
    return count if any(part in name for name in held for part in DRAFTING) else 0


def _layers(header: GgufHeader, layers: tuple[ExpertLayer, ...]) -> tuple[SharedLayer, ...]:
    found: list[SharedLayer] = []
    source: ExpertLayer | None = None
    for layer in layers:
        blk = f"blk.{layer.number}."
        if layer.hashed:
            got = f"is {header.uint('{a}.hash_layer_count')}"
            raise bad_key(header, "{a}.hash_layer_count", got, "0: no V4.1 routes by token")
        if layer.ratio and (source is None or f"{blk}attn_compressor_kv.weight" in header.tensors):
            header.tensor(f"{blk}attn_compressor_kv.weight")
            source = layer
        if layer.ratio and source is not None and source.ratio != layer.ratio:
            got = f"is {layer.ratio} for layer {layer.number}"
            wanted = f"{source.ratio}, as of layer {source.number}, whose entries it reads"
            raise bad_key(header, "{a}.attention.compress_ratios", got, wanted)
        of = source.number if layer.ratio and source is not None else None
        indexes = of == layer.number or (of is not None and f"{blk}indexer.attn_q_b.weight" in header.tensors)
        found.append(SharedLayer(**asdict(layer, recurse=False), source=of, indexes=indexes))
    return tuple(found)


def _candidates(header: GgufHeader, layers: tuple[SharedLayer, ...]) -> CandidateParams | None:
    """Unless the keys say otherwise, the first that picks among single tokens."""
    picking = [layer.number for layer in layers if layer.indexes]
    number = _candidate_layer(header, next((n for n in picking if layers[n].ratio == 1), None))
    if number is None:
        return None
    key = f"{CANDIDATES}source_layer"
    if number not in picking:
        raise bad_key(header, key, f"is {number}", f"a layer that picks: {', '.join(map(str, picking))}")
    for later in picking:
        if later > number and layers[later].ratio != layers[number].ratio:
            got = f"is {number}, with an entry per {layers[number].ratio} tokens"
            wanted = f"a layer after which all pick such; layer {later} has one per {layers[later].ratio}"
            raise bad_key(header, key, got, wanted)
    return CandidateParams(
        layer=number,
        blocks=header.uint(f"{CANDIDATES}top_k", BLOCKS, low=1, high=MAX_WIDTH),
        entries=header.uint(f"{CANDIDATES}block_size", BLOCK_ENTRIES, low=1, high=MAX_WIDTH),
    )


def _candidate_layer(header: GgufHeader, default: int | None) -> int | None:
    """-1 in a file: none."""
    key = f"{CANDIDATES}source_layer"
    if header.metadata.get(header.key(key)) == -1:
        return None
    return header.uint(key, default, high=MAX_LAYERS)
