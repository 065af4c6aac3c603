"""N-gram tables of V4.1: the published constants, what early files leave out, tables larger than memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from luce_arch_deepseek4.engram import compressed_ids
from luce_arch_deepseek4.v41_describe import describe
from luce_arch_deepseek4.v41_geometries import FLASH, PICKERS, SOURCES, shapes_of, with_prefix

from luce_core.contracts import CacheOptions, NgramSpec, SeqTable, SlotState
from luce_core.gguf import read_header
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops
from luce_core.testing.gguf_header import write_header
from luce_core.testing.quantize import quantize
from luce_core.testing.rig import ModelRig

from .models_v41 import ARCH, keys_of, metadata_of, random_tensors, tensors_of, text_of, written
from .oracle_v41 import PUBLISHED_IDS, Oracle, multipliers_of, primes_above

ROWS = (384_006_168, 384_016_682)
LEFT_OUT = ("engram.multipliers", "engram.primes", "engram.offsets")


def params_of(folder, keys):
    path = write_header(folder / "m.gguf", with_prefix(keys, ARCH), shapes_of(FLASH, SOURCES, PICKERS))
    return describe(read_header(path), CacheOptions(0)).details["decoder"].engram


# --- the published hash


@pytest.mark.parametrize("said", [True, False])
def test_the_published_tables_have_their_rows(tmp_path, said):
    """Said by the file or left out: the same buckets, the same factors."""
    keys = {key: value for key, value in FLASH.items() if said or key not in LEFT_OUT}
    engram = params_of(tmp_path, keys)
    assert (engram.num_rows(0), engram.num_rows(1)) == ROWS
    primes = primes_above(16_000_000 - 1, 48)
    assert list(engram.primes) == primes
    assert (sum(primes[:24]), sum(primes[24:])) == ROWS
    assert engram.offsets[:2] == (0, primes[0])
    assert engram.offsets[24:26] == (0, primes[24])
    published = [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert list(engram.multipliers[:4]) == published == multipliers_of(1, 4, PUBLISHED_IDS)
    assert list(engram.multipliers[4:]) == multipliers_of(14, 4, PUBLISHED_IDS)


def test_rows_of_a_text_are_exact_in_64_bits(tmp_path):
    """The published constants on random tokens, against Python's integers."""
    engram = params_of(tmp_path, FLASH)
    spec = NgramSpec(
        compressed=torch.tensor(engram.compressed, dtype=torch.int32),
        pad=engram.pad,
        multipliers=torch.tensor(engram.multipliers).view(2, 4),
        primes=torch.tensor(engram.primes).view(2, 3, 8),
        offsets=torch.tensor(engram.offsets).view(2, 3, 8),
    )
    log = {"row": torch.zeros(1, 1, 1, dtype=torch.int32)}
    history = SlotState("history", torch.zeros(1, 3, 1, dtype=torch.int32), log, "shift")
    text = np.random.default_rng(0).integers(0, FLASH["vocab_size"], 200).tolist()
    tables = {"near": SeqTable((0,), (0,))}
    got = build_ops().ngram_rows(make_batch("prefill", [RowSet(0, 0, text, tables)]), history, spec)
    oracle = Oracle(FLASH, {})
    for place, layer in enumerate((1, 14)):
        oracle.layer = layer
        want = [oracle.rows_of(text, t, ()) for t in range(len(text))]
        assert got[:, place].tolist() == want
        assert max(map(max, want)) < ROWS[place]
        assert max(map(max, want)) > 0.99 * ROWS[place]


# --- what early files leave out

WORDS = {
    "the": 0,
    "The": 0,  # lower case
    "Ġthe": 0,  # " the": cut off
    "ĠTHEĊ": 0,
    "Ġ": 1,  # a lone space stays one
    "ĠĠĠ": 1,
    "Ċĉ": 1,
    "": 2,
    "Ã©": 3,  # "é" loses its accent
    "e": 3,
    "Ãī": 3,  # "É"
    "ï¬ģ": 4,  # the ligature "fi"
    "fi": 4,
    "Ã": 5,  # half a character stands for itself
    "ã": 6,
    "aĠĠb": 7,
    "AĉB": 7,
    "<｜end▁of▁sentence｜>": 8,  # written out, not in bytes; its bars have a compatible form
    "Ģ": 9,  # byte 0x80 alone
    "ÌĢ": 10,  # an accent alone: nothing is left, so it stands for itself
}


def test_tokens_that_read_alike_share_an_id():
    assert dict(zip(WORDS, compressed_ids(list(WORDS)), strict=True)) == WORDS


def test_an_early_file_is_read_by_its_vocabulary(tmp_path):
    """The same model with its constants said and left out."""
    tokens = [*(f"Ġw{n}" for n in range(30)), *(f"W{n}" for n in range(31))]
    ids = compressed_ids(tokens)
    assert max(ids) == 30
    keys = keys_of("n-grams") | {
        "engram.head_count": 1,
        "engram.max_ngram_size": 2,
        "engram.pad_id": ids[2],
        "engram.token_map": np.array(ids, np.int32),
        "engram.multipliers": np.array(multipliers_of(1, 2, 31), np.uint64),
        "engram.primes": np.array([16_000_057], np.uint64),
        "engram.offsets": np.array([0], np.uint64),
    }
    assert primes_above(16_000_000, 1) == [16_000_057]
    more = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    constants = ("pad_id", "token_map", "multipliers", "primes", "offsets")
    early = {key: value for key, value in keys.items() if key.removeprefix("engram.") not in constants}
    found = []
    for name, said in (("said", keys), ("early", early)):
        metadata = {**metadata_of(said), **more}
        lists = {key: list(v) if isinstance(v, np.ndarray) else v for key, v in metadata.items()}
        path = write_header(tmp_path / f"{name}.gguf", lists, tensors_of(keys), lambda *_: "F32")
        found.append(describe(read_header(path), CacheOptions(0)).details["decoder"].engram)
    assert found[0] == found[1]


# --- tables larger than memory


class Holes:
    """A table of zeros, but for some rows."""

    def __init__(self, width):
        self.width, self.rows = width, {}

    def __getitem__(self, rows):
        return np.stack([self.rows.get(row, np.zeros(self.width)) for row in rows])


def huge_model(path, text):
    """A small model with tables of the published row totals, 13 GB each, on a few KB of disk; its oracle."""
    keys = keys_of("n-grams") | {
        key: value for key, value in FLASH.items() if key.startswith("engram.") and key != "engram.token_map"
    }
    keys |= {"engram.layer_ids": [1, 2], "engram.key_length": 32}
    keys |= {"engram.token_map": [token * 1201 % PUBLISHED_IDS for token in range(61)]}
    shapes = tensors_of(keys)
    tables = [name for name in shapes if name.endswith("engram_embd.weight")]
    assert [shapes[name][0] for name in tables] == list(ROWS)
    metadata = metadata_of(keys)
    write_header(path, metadata, shapes, lambda name, shape: "Q8_0" if name in tables else "F32")
    small = {name: shape for name, shape in shapes.items() if name not in tables}
    tensors = {
        name: one for name, one in random_tensors(keys | {"engram.layer_ids": []}).items() if name in small
    }
    tensors |= {
        name: noise_of(shape, seed) for seed, (name, shape) in enumerate(small.items()) if name not in tensors
    }
    oracle = Oracle(keys, tensors)
    header = read_header(path)
    with path.open("rb+") as file:
        for name, numbers in tensors.items():
            file.seek(header.tensor(name).offset)
            file.write(numbers.tobytes())
        for layer, name in zip((1, 2), tables, strict=True):
            info, holes = header.tensor(name), Holes(32)
            oracle.layer, oracle.tensors[name] = layer, holes
            named = sorted({row for t in range(len(text)) for row in oracle.rows_of(text, t, ())})
            for row, numbers in zip(named, noise_of((len(named), 32), layer), strict=True):
                packed = quantize(numbers[None], "Q8_0")
                holes.rows[row] = info.format.dequantize(np.ascontiguousarray(packed).view(np.uint8))[0]
                file.seek(info.offset + row * info.row_bytes)
                file.write(packed.tobytes())
    return oracle


def noise_of(shape, seed):
    return (np.random.default_rng(seed).standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


def resident():
    """Bytes of this process that are in memory."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def test_tables_of_26_gb_are_read_by_row(tmp_path):
    """Logits of the oracle, nothing of the tables in memory but the rows the text names."""
    torch.set_num_threads(1)
    path, text = tmp_path / "huge.gguf", text_of(40)
    oracle = huge_model(path, text)
    assert path.stat().st_size > 26e9
    assert path.stat().st_blocks * 512 < 40e6
    want = torch.tensor(oracle.run(text))
    before = resident()
    rig = ModelRig(path, "luce_arch_deepseek4.hooks")
    assert rig.spec.weight_bytes < 4 << 20
    assert sum(size.num_bytes for size in rig.spec.stored.values()) > 26e9
    got = rig.fresh(text)
    seq = rig.open()
    rig.prefill({seq: text[:33]})
    decoded = torch.stack([rig.decode(seq, token) for token in text[33:]])
    for logits, wanted in ((got, want), (decoded, want[33:])):
        assert float((logits - wanted).abs().max() / want.abs().max()) < 5e-6
    assert resident() - before < 64 << 20
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read(), "the file is still mapped"
    assert float(want[5:].std()) > 0.1
    silent = Oracle(
        oracle.keys, {name: one for name, one in oracle.tensors.items() if "engram_embd" not in name}
    )
    silent.tensors |= {name: Holes(32) for name in oracle.tensors if "engram_embd" in name}
    assert np.abs(silent.run(text) - want.numpy()).max() > 0.1, "the rows of the tables matter"


def test_a_parked_model_reads_its_tables_again(tmp_path):
    keys = keys_of("n-grams")
    rig = ModelRig(written(tmp_path / "m.gguf", keys, random_tensors(keys)), "luce_arch_deepseek4.hooks")
    text = text_of(20)
    before = rig.fresh(text)
    rig.model.park()
    rig.model.unpark()
    assert torch.equal(rig.fresh(text), before)
