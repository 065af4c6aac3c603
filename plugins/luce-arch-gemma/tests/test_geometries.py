"""The kit's contract of published sizes; small ones have as many layers as 31B."""

from typing import ClassVar

from luce_arch_gemma.geometries import FORMATS, RANGES, gemma3_metadata, gemma4_metadata, shapes_of

from luce_core.contracts import Geometry
from luce_core.testing.geometry_contract import GeometryContract, Published

VOCAB = 400
PATTERN = [(layer + 1) % 6 != 0 for layer in range(60)]
GEMMA4 = {"layers": 60, "width": 64, "heads": 4, "kv_heads": (2, 1), "dims": (32, 64), "ffn": 96}
EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}
INPUTS = {"attention.shared_kv_layers": 20, "embedding_length_per_layer_input": 32}


class TestGemma(GeometryContract):
    hooks = "luce_arch_gemma.hooks"
    published: ClassVar = {
        # values alone in the global layers of Gemma 4: keys are made of them
        "gemma-3-270m": Published(268_098_176, 246_587_904, 3_072, 0, {512: 15_360}),
        "gemma-4-31b": Published(30_697_345_596, 18_671_229_168, 40_960, 0, {1024: 819_200}),
        "gemma-4-26b-a4b": Published(25_233_142_046, 16_780_192_888, 10_240, 0, {1024: 204_800}),
    }

    def small(self):
        three = gemma3_metadata(layers=26, width=64, heads=4, kv_heads=1, dim=32, ffn=96, window=8)
        yield self.geometry("small-3", three)
        for name, more in (("dense", {}), ("experts", EXPERTS), ("inputs", INPUTS)):
            keys = gemma4_metadata(**GEMMA4, pattern=PATTERN)
            yield self.geometry(f"small-{name}", keys | {f"gemma4.{key}": more[key] for key in more})

    def geometry(self, name, keys):
        shapes = shapes_of(keys, VOCAB, k_eq_v=name != "small-inputs")
        sized = {**keys, f"{keys['general.architecture']}.vocab_size": VOCAB}
        return Geometry(name, sized, shapes, formats=FORMATS, ranges=RANGES)
