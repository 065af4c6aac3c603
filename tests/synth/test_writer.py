"""Files: read back by both readers, whole and in shards; what is refused; and that nothing is left behind."""

import os
import shutil
from math import prod
from pathlib import Path
from types import SimpleNamespace

import attrs
import gguf
import numpy as np
import pytest

from luce_core import synth
from luce_core.contracts import Geometry
from luce_core.errors import CapacityError, PluginError, UsageError
from luce_core.gguf import GgufFile, read_header
from luce_core.plugins import from_modules
from luce_core.synth import writer
from luce_core.testing.dense import hooks
from luce_core.testing.dense.geometries import dense
from luce_core.testing.fake_plugins import make_plugin

SMALL = dense("dense-tiny", layers=3, width=256, ffn=288, vocab=500)


def weights(path):
    with GgufFile.open(path) as file:
        return {name: file.raw(name).tobytes() for name in file.header.tensors}


def left(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("quant", synth.quants_of(SMALL))
def test_what_is_written_is_read_by_both_readers(tmp_path, quant):
    progress = []
    (path,) = synth.write(SMALL, quant, tmp_path / "m.gguf", progress=lambda *seen: progress.append(seen))
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    assert {name: info.shape for name, info in ours.tensors.items()} == dict(SMALL.shapes)
    assert [tensor.name for tensor in theirs.tensors] == list(SMALL.shapes)
    formats = synth.formats_of(SMALL, quant)
    assert {tensor.name: tensor.tensor_type.name for tensor in theirs.tensors} == formats
    assert ours.uint("{a}.embedding_length") == 256
    assert theirs.fields["tokenizer.ggml.tokens"].contents()[97] == "a"
    size = path.stat().st_size
    assert progress[-1] == (size, size)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert left(tmp_path) == ["m.gguf"]


def test_numbers_are_those_of_their_role(tmp_path):
    ranges = {"blk.1.attn_norm.weight": (5.0, 6.0), "token_ids.weight": (0, 9)}
    more = {"token_ids.weight": (500, 3), "bias": (40,)}
    made = attrs.evolve(
        SMALL, shapes={**SMALL.shapes, **more}, ranges=ranges, formats={"token_ids.weight": "I32"}
    )
    (path,) = synth.write(made, "q4_k_m", tmp_path / "m.gguf")
    with GgufFile.open(path) as file:
        norm = file.dequantize("blk.0.attn_norm.weight")
        assert 0.9 <= norm.min() < norm.max() <= 1.1
        norm = file.dequantize("blk.1.attn_norm.weight")
        assert 5.0 <= norm.min() < norm.max() <= 6.0
        bias = file.dequantize("bias")
        assert -0.1 <= bias.min() < bias.max() <= 0.1
        ids = file.raw("token_ids.weight").view(np.int32)
        assert (ids.min(), ids.max()) == (0, 9)
        assert all(len(set(row)) == 3 for row in ids.tolist())
        matrix = file.dequantize("blk.0.attn_q.weight")
        assert np.std(matrix) == pytest.approx(256**-0.5, rel=0.03)


def test_the_seed_decides_every_byte(tmp_path):
    one, same, other = (
        synth.write(SMALL, "q4_k_m", tmp_path / f"{number}.gguf", seed=seed)[0].read_bytes()
        for number, seed in enumerate((7, 7, 8))
    )
    assert one == same
    assert one != other


def test_a_header_alone_takes_no_disk(tmp_path):
    large = dense("dense-large", layers=30, width=8192, ffn=28672, vocab=500)
    (path,) = synth.write(large, "q8_0", tmp_path / "m.gguf", header_only=True)
    assert path.stat().st_size > synth.num_bytes(large, "q8_0") > 20e9
    assert path.stat().st_blocks * 512 < 1 << 20
    assert sum(info.num_weights for info in read_header(path).tensors.values()) == large.parameters


# --- shards


@pytest.mark.parametrize("count", [2, 3, 7, len(SMALL.shapes)])
def test_shards_hold_the_bytes_of_the_whole(tmp_path, count):
    (whole,) = synth.write(SMALL, "q4_k_m", tmp_path / "w.gguf")
    paths = synth.write(SMALL, "q4_k_m", tmp_path / "m.gguf", shards=count)
    assert [path.name for path in paths] == [f"m-{n + 1:05}-of-{count:05}.gguf" for n in range(count)]
    assert weights(paths[0]) == weights(whole)
    header = read_header(paths[0])
    assert len(header.shards) == count
    assert header.str("tokenizer.ggml.model") == "gpt2"
    first = gguf.GGUFReader(paths[0])
    kinds = {key: first.fields[key].types[0] for key in ("split.no", "split.count", "split.tensors.count")}
    assert kinds == {
        "split.no": gguf.GGUFValueType.UINT16,
        "split.count": gguf.GGUFValueType.UINT16,
        "split.tensors.count": gguf.GGUFValueType.INT32,
    }
    assert len(left(tmp_path)) == count + 1


def test_shards_are_of_about_one_size():
    even = Geometry("even", SMALL.metadata, {f"{n}.weight": (256, 256) for n in range(40)})
    planned = synth.plan_shards(even, "q8_0", Path("m.gguf"), tokenizer=False, shards=4)
    assert [len(shard.tensors) for shard in planned] == [10, 10, 10, 10]


def test_shards_of_a_size_are_as_many_as_it_takes(tmp_path):
    limit = 100_000
    paths = synth.write(SMALL, "q4_k_m", tmp_path / "m.gguf", shard_bytes=limit, tokenizer=False)
    headers = [gguf.GGUFReader(path) for path in paths]
    data = [sum(int(tensor.n_bytes) for tensor in reader.tensors) for reader in headers]
    assert len(paths) > 3
    assert all(size <= limit or len(reader.tensors) == 1 for size, reader in zip(data, headers, strict=True))
    assert sum(data) == synth.num_bytes(SMALL, "q4_k_m")


@pytest.mark.parametrize("shards", [0, -1, len(SMALL.shapes) + 1])
def test_a_number_of_shards_that_cannot_be(tmp_path, shards):
    with pytest.raises(UsageError, match=rf"{shards} shards were asked for; wanted 1 to {len(SMALL.shapes)}"):
        synth.write(SMALL, "q4_k_m", tmp_path / "m.gguf", shards=shards)


def test_shards_by_number_and_size_at_once(tmp_path):
    with pytest.raises(UsageError, match="Give one of them"):
        synth.write(SMALL, "q4_k_m", tmp_path / "m.gguf", shards=2, shard_bytes=5)


def test_too_small_shards_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_SHARDS", 5)
    with pytest.raises(UsageError, match=r"would be \d+ files; wanted at most 5"):
        synth.write(SMALL, "q4_k_m", tmp_path / "m.gguf", shard_bytes=1)


# --- what is refused, and what is left


def test_what_is_there_is_only_overwritten_when_told(tmp_path):
    target = tmp_path / "m.gguf"
    target.write_bytes(b"mine")
    with pytest.raises(UsageError, match="is there already"):
        synth.write(SMALL, "q4_k_m", target)
    assert target.read_bytes() == b"mine"
    synth.write(SMALL, "q4_k_m", target, overwrite=True)
    assert read_header(target).arch == "dense"


@pytest.mark.parametrize("name", ["m.bin", "m", "m.gguf.part"])
def test_a_name_that_is_no_model_file(tmp_path, name):
    with pytest.raises(UsageError, match=r"a name that ends in .gguf"):
        synth.write(SMALL, "q4_k_m", tmp_path / name)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"is not there. Make it first"):
        synth.write(SMALL, "q4_k_m", tmp_path / "no" / "m.gguf")


def test_a_disk_without_room_is_known_before(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CapacityError, match=r"has .* free, it takes"):
        synth.write(SMALL, "q4_k_m", tmp_path / "m.gguf")
    assert left(tmp_path) == []
    synth.write(SMALL, "q4_k_m", tmp_path / "m.gguf", header_only=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("shards", [1, 4])
def test_interrupted_anywhere_nothing_is_left(tmp_path, error, shards):
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"mine")
    seen = []
    synth.write(SMALL, "q8_0", tmp_path / "n.gguf", shards=shards, progress=lambda *at: seen.append(at))
    for path in tmp_path.glob("n*"):
        path.unlink()
    for last in range(0, len(seen), 7):
        ticks = iter(range(len(seen)))

        def stop(_done, _total, ticks=ticks, last=last):
            if next(ticks) == last:
                raise error

        with pytest.raises((KeyboardInterrupt, UsageError)):
            synth.write(SMALL, "q8_0", tmp_path / "m.gguf", shards=shards, progress=stop)
        assert left(tmp_path) == ["mine.gguf"]


def test_a_disk_that_fills_up_is_said(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"could not be written: No space left on device. Nothing of it"):
        synth.write(SMALL, "q8_0", tmp_path / "m.gguf")
    assert left(tmp_path) == []


def test_a_file_is_as_readable_as_others(tmp_path):
    (path,) = synth.write(SMALL, "q8_0", tmp_path / "m.gguf")
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


# --- by name


def test_names_and_aliases_are_found():
    registry = from_modules([hooks])
    assert synth.find(registry, "dense-small").arch == "dense"
    (one,) = synth.geometries(registry)
    assert (one.plugin, one.value.parameters) == ("dense", sum(map(prod, one.value.shapes.values())))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r"'dense-smal'. Did you mean 'dense-small'\?"):
        synth.find(from_modules([hooks]), "dense-smal")


def plugin(made, name="other", monkeypatch=None):
    monkeypatch.setattr("luce_core.testing.dense.geometries.other", made, raising=False)
    spec = hooks.luce_register_archs()[0]
    arch = attrs.evolve(spec, names=(name,), geometries="luce_core.testing.dense.geometries:other")
    return make_plugin(name, luce_register_archs=[arch])


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda: ["dense"], "returned 'dense', wanted a Geometry"),
        (lambda: [attrs.evolve(SMALL, name="Dense 7B")], "has the name 'Dense 7B', wanted lower-case"),
        (
            lambda: [attrs.evolve(SMALL, name="dense-small")],
            "is declared by plugin 'dense' and by plugin 'oth",
        ),
        (lambda: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_a_plugin_that_breaks_the_contract_is_named(made, complaint, monkeypatch):
    registry = from_modules([hooks, plugin(made, monkeypatch=monkeypatch)])
    with pytest.raises(PluginError, match=complaint):
        synth.by_name(registry)


def test_geometries_that_name_no_callable_keep_a_plugin_out():
    arch = attrs.evolve(hooks.luce_register_archs()[0], names=("other",), geometries="nowhere")
    with pytest.raises(PluginError, match=r"broken: .*geometries is 'nowhere', wanted 'module:callable'"):
        from_modules([hooks, make_plugin("other", luce_register_archs=[arch])])
