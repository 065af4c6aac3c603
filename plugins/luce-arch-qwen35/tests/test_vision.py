"""The image encoder against Hugging Face's, on random weights: sizes, patches, rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from luce_arch_qwen35.images import ImageProcessor, fitted_size, most_encoded
from luce_arch_qwen35.tower import ImageEncoder
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from luce_core.contracts import CacheOptions, MediaContext, ModelPlan, StateSizes
from luce_core.errors import ModelFormatError, RequestError
from luce_core.gguf import read_header
from luce_core.model.loader import Loader
from luce_core.registry import resolve
from luce_core.testing.plugin import registry_of
from luce_core.testing.rig import describe

from .hugging_face import written
from .vision import picture, processor_of, projector, projector_tensors, seeing_model

HOOKS = "luce_arch_qwen35.hooks"
TOLERANCE = 2e-5
"""Of the largest number."""
MOST = 2**17


@pytest.fixture(scope="module")
def model():
    return seeing_model()


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """(text model, projector)"""
    folder = tmp_path_factory.mktemp("seeing")
    return written(folder / "text.gguf", model.text), projector(folder / "mmproj.gguf", model)


def context_of(files, max_pixels=MOST):
    registry, cache = registry_of(HOOKS), CacheOptions(0)
    target = describe(registry, files[0], cache)
    header = read_header(files[1])
    spec = resolve(registry.arch(header.family).value.describe, "")(header, cache)
    return MediaContext("qwen3vl", None, target, spec, str(files[1]), max_pixels)


def encoder_of(files, hooks=(HOOKS,), layers=()):
    registry, context = registry_of(*hooks), context_of(files)
    path = str(files[1])
    plan = ModelPlan("mmproj", "encoder", path, context.encoder, "qwen35", ("cpu",), op_layers=layers)
    sizes = StateSizes(8, {}, 1, 8)
    build = resolve(registry.arch(context.encoder.arch).value.build, "")

    def layer_of(name):
        return {op.op: resolve(op.fn, "") for op in registry.op_layer(name).value.ops}

    return ImageEncoder(Loader(lambda arch: build, layer_of, sizes).load(plan))


def rows_of(encoder, media):
    steps = list(encoder.encode([media]))
    assert all(step is None for step in steps[:-1])
    return steps[-1]


@torch.no_grad()
def hugging_face_rows(model, pixels, max_pixels=MOST):
    """(rows, grid in patches)"""
    given = {"input_data_format": "channels_last", "return_tensors": "pt"}
    made = processor_of(model, max_pixels)(images=[pixels], **given)
    out = model.tower(made["pixel_values"].float(), grid_thw=made["image_grid_thw"])
    return out.pooler_output, made["image_grid_thw"][0].tolist()


SIZES = [
    (256, 256),
    (300, 217),
    (64, 900),
    (900, 64),
    (16, 16),
    (2, 2),
    (5, 500),
    (700, 700),
    (1111, 333),
]


@pytest.mark.parametrize("size", SIZES)
def test_rows_equal_those_of_hugging_face(size, model, files):
    pixels = np.asarray(picture(*size, seed=sum(size)))
    want, grid = hugging_face_rows(model, pixels)
    media = ImageProcessor(context_of(files)).prepare(pixels)
    assert media.grid == (grid[1] // 2, grid[2] // 2)
    assert media.rows == len(want)
    got = rows_of(encoder_of(files), media)
    assert float((got - want).abs().max()) <= TOLERANCE * float(want.abs().max())


@pytest.mark.parametrize(
    "vision",
    [
        {"patch_size": 16, "num_position_embeddings": 4, "num_heads": 1, "hidden_size": 40},
        {"spatial_merge_size": 3, "patch_size": 6, "num_position_embeddings": 100},
        {"spatial_merge_size": 1, "depth": 1, "num_heads": 12},
    ],
)
def test_other_geometries(vision, tmp_path):
    model = seeing_model(vision=vision)
    files = written(tmp_path / "text.gguf", model.text), projector(tmp_path / "mmproj.gguf", model)
    pixels = np.asarray(picture(120, 250))
    want, _ = hugging_face_rows(model, pixels)
    got = rows_of(encoder_of(files), ImageProcessor(context_of(files)).prepare(pixels))
    assert float((got - want).abs().max()) <= TOLERANCE * float(want.abs().max())


def test_the_patches_are_the_numbers_of_the_published_processor(model, files):
    pixels = np.asarray(picture(333, 421, seed=4))
    made = processor_of(model, MOST)(images=[pixels], return_tensors="np")["pixel_values"]
    media = ImageProcessor(context_of(files)).prepare(pixels)
    raw = torch.tensor(np.frombuffer(media.data, np.uint8).reshape(media.shape))
    patches = encoder_of(files).model.network._patches(raw)
    # theirs have every frame twice: channel, time, row, column
    first = made.reshape(len(made), 3, 2, 64)[:, :, 0].reshape(len(made), -1)
    np.testing.assert_allclose(patches.numpy(), first, atol=2e-6)


def test_sizes_are_those_of_the_published_rule():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    draw = np.random.default_rng(3)
    for _ in range(3000):
        height, width = (int(2 ** draw.uniform(0, 13)) for _ in range(2))
        if max(height, width) > 200 * min(height, width):
            continue
        for unit, least, most in ((32, 65536, 2**21), (16, 4096, 2**16), (28, 3136, 10**6)):
            want = smart_resize(height, width, unit, least, most)
            assert fitted_size(height, width, unit, least, most) == tuple(want), (height, width)


def test_no_size_is_beyond_what_the_plan_counts_with():
    draw = np.random.default_rng(5)
    for _ in range(5000):
        unit, most = (int(2 ** draw.uniform(low, high)) for low, high in ((3, 6), (12, 22)))
        height = int(2 ** draw.uniform(0, 12))
        width = max(1, int(height * draw.uniform(1 / 200, 200)))
        high, wide = fitted_size(height, width, unit, min(65536, most), most)
        assert high * wide <= most_encoded(unit, max(most, unit * unit)), (height, width, unit, most)


def test_an_image_that_is_a_line_is_refused(files):
    with pytest.raises(RequestError, match="201 x 1 pixels"):
        ImageProcessor(context_of(files)).prepare(np.zeros((1, 201, 3), np.uint8))


def test_the_digest_is_of_the_pixels_that_are_encoded(files):
    context = context_of(files)
    processor = ImageProcessor(context)
    pixels = np.asarray(picture(256, 256)).copy()
    same = processor.prepare(pixels.copy())
    assert processor.prepare(pixels) == same
    assert ImageProcessor(evolve(context, max_pixels=2**17)).prepare(pixels).digest == same.digest
    pixels[255, 255, 2] ^= 1
    other = processor.prepare(pixels)
    assert (other.grid, other.digest == same.digest) == (same.grid, False)
    # the same bytes in another shape
    flat = processor.prepare(np.zeros((128, 512, 3), np.uint8))
    tall = processor.prepare(np.zeros((512, 128, 3), np.uint8))
    assert flat.data == tall.data
    assert flat.digest != tall.digest


# --- bad files


@pytest.mark.parametrize(
    "name",
    [
        "v.patch_embd.weight",
        "v.patch_embd.weight.1",
        "v.position_embd.weight",
        "v.blk.2.attn_qkv.bias",
        "v.blk.1.ln2.weight",
        "v.post_ln.bias",
        "mm.0.weight",
        "mm.2.bias",
    ],
)
def test_a_tensor_that_is_missing_or_misshapen_is_named(name, model, tmp_path):
    registry = registry_of(HOOKS)
    for number, more in enumerate(({}, {name: np.zeros((5, 3), np.float32)})):
        path = projector(tmp_path / f"{number}.gguf", model, drop=() if more else (name,), **more)
        header = read_header(path)
        with pytest.raises(ModelFormatError, match=name.replace(".", r"\.")):
            resolve(registry.arch(header.family).value.describe, "")(header, CacheOptions(0))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("clip.vision.attention.head_count", 7, "divisor of the width 48"),
        ("clip.vision.block_count", 4, "v.blk.3"),
        ("clip.vision.image_std", [0.0, 1.0, 1.0], "image_std"),
        ("clip.vision.image_mean", [0.5], "three numbers"),
        ("clip.vision.is_deepstack_layers", [False, True, False], "Qwen3-VL"),
        ("clip.vision.patch_size", 0, "patch_size"),
    ],
)
def test_a_key_that_cannot_be_is_named(key, value, said, model, tmp_path):
    header = read_header(projector(tmp_path / "p.gguf", model, metadata={key: value}))
    with pytest.raises(ModelFormatError, match=said):
        resolve(registry_of(HOOKS).arch(header.family).value.describe, "")(header, CacheOptions(0))


def test_every_tensor_of_the_file_is_read(model):
    names = projector_tensors(model)
    assert len(names) == 3 * 12 + 4 + 2 + 4


# --- memory


def test_no_tensor_is_larger_than_planned(monkeypatch, model, files):
    """9216 patches, whose pairs are 85 M: what is made at once stays within what the plan counts."""
    from luce_arch_qwen35 import images, tower

    from .test_long_text import Largest

    monkeypatch.setattr(tower, "SCORE_BYTES", 2**22)
    context = context_of(files, 9216 * 64)
    media = ImageProcessor(context).prepare(np.zeros((768, 768, 3), np.uint8))
    assert media.rows * 4 == 9216
    with Largest() as largest:
        steps = list(encoder_of(files).encode([media]))
    assert largest.elements < 9216 * 48 * 3 * 2
    assert len(steps) > 3 * 9216**2 * 3 * 4 // 2**22  # it stops between all of them
    assert images.workspace_bytes(context.encoder.details["vision"], 9216 * 64) > 4 * largest.elements


def test_the_plan_counts_a_published_tower_right():
    """Qwen3.5-27B's: 27 layers of 1152, on 2 Mi pixels; 8192 patches."""
    from luce_arch_qwen35.images import workspace_bytes
    from luce_arch_qwen35.vision import VisionParams

    params = VisionParams(27, 1152, 16, 4304, 5120, 16, 2, 48, 1e-6, (0.5,) * 3, (0.5,) * 3)
    assert 0.5e9 < workspace_bytes(params, 2**21) < 0.9e9


class Living(TorchDispatchMode):
    """The most bytes that operations' results held at a time."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self.alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {at: held for at, held in self.alive.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return made


@pytest.mark.parametrize("vision", [{}, {"intermediate_size": 500}, {"hidden_size": 192}])
def test_encoding_takes_no_more_than_the_plan_counts(vision, monkeypatch, tmp_path):
    """Nor much less, or others would go without."""
    from luce_arch_qwen35 import images, tower

    for module in (images, tower):
        monkeypatch.setattr(module, "SCORE_BYTES", 2**16)
        monkeypatch.setattr(module, "BLOCK_ROWS", 256)
    model = seeing_model(vision={"depth": 1, **vision})
    files = written(tmp_path / "text.gguf", model.text), projector(tmp_path / "mmproj.gguf", model)
    context, encoder = context_of(files, 2**16), encoder_of(files)
    for size in ((256, 256), (8, 1600)):
        media = ImageProcessor(context).prepare(np.zeros((*size, 3), np.uint8))
        with Living() as living:
            rows_of(encoder, media)
        planned = ImageProcessor(context).workspace_bytes
        assert living.most <= planned, f"{size}: {living.most} of {planned}"
    assert living.most > planned / 4
