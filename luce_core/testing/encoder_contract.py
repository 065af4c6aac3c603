"""The contract of image encoders: what the server's half makes ready, and what the engine's makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor

from luce_core.contracts import Media, MediaProcessor
from luce_core.errors import ModelFormatError
from luce_core.media.placing import row_keys
from luce_core.pipeline import Pipeline
from luce_core.plan_media import media_processor
from luce_core.testing.contract import Contract
from luce_core.testing.fresh import run_fresh
from luce_core.testing.pipeline import TOY_HOOKS, make_pipeline, make_test_plan, registry_of

SIZES = ((64, 64), (40, 100), (130, 50))
MAX_PIXELS = 2**16
DIGEST_BYTES = 16
_PROBE = """
import importlib, sys
from luce_core.plugins import from_modules
from luce_core.registry import resolve
registry = from_modules([importlib.import_module(sys.argv[1])])
for item in registry.parts("encoder"):
    resolve(item.value.processor, "processor")
print(" ".join(name for name in ("torch", "triton") if name in sys.modules))
"""


@frozen
class Pair:
    """A model and the file of its encoder."""

    text: Path
    projector: Path


@frozen(eq=False)
class Halves:
    """An encoder as a server has it: what prepares, and the pipeline with what encodes."""

    processor: MediaProcessor
    pipeline: Pipeline

    def rows(self, *items: Media) -> list[Tensor]:
        """What is encoded, one per item."""
        return [made for made in self.encode(*items) if made is not None]

    def encode(self, *items: Media) -> list[Tensor | None]:
        """Everything the encoder yields."""
        (encoder,) = self.pipeline.encoders
        return list(encoder.encode(items))


class EncoderContract(Contract):
    """An encoder part and its processor, over two files that go together."""

    hooks: str
    """The plugin's module of hooks."""
    more_hooks: tuple[str, ...] = ()
    """Of whoever serves the text model, where the plugin does not."""

    def make_files(self, folder: Path) -> Pair:
        """A small model and its projector file, written to `folder`."""
        raise NotImplementedError("a subclass of EncoderContract writes its two files here")

    def make_wrong(self, folder: Path) -> Path:
        """A projector file made for a model of another width."""
        raise NotImplementedError("a subclass of EncoderContract writes a file that does not fit here")

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Pair:
        """The two files."""
        return self.make_files(tmp_path)

    @pytest.fixture
    def halves(self, pair: Pair) -> Halves:
        """Planned and composed as in `serve`."""
        pipeline = make_pipeline(pair.text, *self._hooks(), options=self._options(pair.projector))
        processor = media_processor(pipeline.plan, registry_of(*self._hooks()))
        assert processor is not None
        return Halves(processor, pipeline)

    def _hooks(self) -> tuple[str, ...]:
        return (TOY_HOOKS, self.hooks, *self.more_hooks)

    def _options(self, projector: Path, max_pixels: int = MAX_PIXELS) -> dict[str, Any]:
        return {"mmproj": str(projector), "image_max_pixels": max_pixels, "threads": 1}

    # --- the server's half

    def test_its_processor_imports_neither_torch_nor_triton(self) -> None:
        assert not run_fresh(_PROBE, self.hooks).split()

    def test_what_it_prepares_is_what_it_says(self, halves: Halves) -> None:
        for number, size in enumerate(SIZES):
            media = halves.processor.prepare(_image(*size, number))
            height, width = media.grid
            assert media.rows == height * width > 0
            assert len(media.data) == int(np.prod(media.shape))
            assert len(media.digest) == DIGEST_BYTES
            assert media.encoder in halves.pipeline.plan.parts["encoder"]

    def test_equal_images_have_equal_keys_and_others_have_none_in_common(self, halves: Halves) -> None:
        pixels = _image(*SIZES[0], 1)
        first = halves.processor.prepare(pixels)
        assert halves.processor.prepare(pixels.copy()) == first
        others = [halves.processor.prepare(_image(*SIZES[0], 2))]
        for at in ((0, 0, 0), (-1, -1, 2)):
            changed = pixels.copy()
            changed[at] ^= 0x80
            others.append(halves.processor.prepare(changed))
        for other in others:
            assert other.rows == first.rows
            assert not set(row_keys(other)) & set(row_keys(first))

    def test_large_images_are_made_smaller(self, pair: Pair, halves: Halves) -> None:
        registry = registry_of(*self._hooks())
        few = make_test_plan(pair.text, *self._hooks(), options=self._options(pair.projector, 4096))
        smaller = media_processor(few, registry)
        assert smaller is not None
        for side in (200, 1000):
            pixels = _image(side, side)
            assert smaller.prepare(pixels).rows < halves.processor.prepare(pixels).rows

    def test_the_tokenizer_has_its_placeholder(self, halves: Halves) -> None:
        tokenizer: Any = halves.pipeline.target.tokenizer
        assert tokenizer.token_id(halves.processor.placeholder) is not None

    # --- the engine's half

    def test_every_image_becomes_its_rows(self, halves: Halves) -> None:
        width = halves.pipeline.target.backend.spec.hidden
        for number, size in enumerate(SIZES):
            media = halves.processor.prepare(_image(*size, number))
            (rows,) = halves.rows(media)
            assert rows.shape == (media.rows, width)
            assert torch.isfinite(rows).all()

    def test_an_image_is_encoded_alike_whatever_comes_before_it(self, halves: Halves) -> None:
        items = [halves.processor.prepare(_image(*size, n)) for n, size in enumerate(SIZES)]
        together = halves.rows(*items)
        for item, rows in zip(items, together, strict=True):
            assert torch.equal(halves.rows(item)[0], rows)
        assert not torch.equal(together[0], halves.rows(halves.processor.prepare(_image(*SIZES[0], 9)))[0])

    def test_it_stops_between_pieces_of_work(self, halves: Halves) -> None:
        made = halves.encode(halves.processor.prepare(_image(200, 200)))
        assert made[-1] is not None
        assert made.count(None) == len(made) - 1 > 0

    def test_it_can_be_left_in_the_middle(self, halves: Halves) -> None:
        (encoder,) = halves.pipeline.encoders
        item = halves.processor.prepare(_image(*SIZES[0]))
        want = halves.rows(item)[0]
        work = encoder.encode((item,))
        assert next(work) is None
        work.close()
        assert torch.equal(halves.rows(item)[0], want)

    # --- the plan

    def test_the_plan_counts_what_it_takes(self, pair: Pair) -> None:
        sizes = []
        for most in (MAX_PIXELS, 4 * MAX_PIXELS):
            plan = make_test_plan(pair.text, *self._hooks(), options=self._options(pair.projector, most))
            claims = {claim.owner: claim.num_bytes for claim in plan.claims}
            assert claims["weights of mmproj"] > 0
            sizes.append(claims["images through mmproj"])
        assert 0 < sizes[0] < sizes[1]

    def test_a_file_that_does_not_go_with_the_model_is_named(self, pair: Pair, tmp_path: Path) -> None:
        folder = tmp_path / "wrong"
        folder.mkdir()
        wrong = self.make_wrong(folder)
        with pytest.raises(ModelFormatError) as caught:
            make_test_plan(pair.text, *self._hooks(), options=self._options(wrong))
        assert str(wrong) in str(caught.value)


def _image(height: int, width: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
