"""Each rule of the contract of encoders catches one that breaks it."""

from importlib import import_module
from textwrap import dedent

import pytest

# Imported here so that the runs inside these tests share one copy of them.
for part in ("encoder_contract", "dense.hooks", "dense.network", "pictures.hooks", "pictures.tower"):
    import_module(f"luce_core.testing.{part}")

HOOKS = """
from luce_core.contracts import *
from luce_core.hookspecs import hookimpl
from luce_core.testing.pictures.hooks import luce_register_archs

@hookimpl
def luce_plugin_info():
    return PluginInfo("broken", API)

@hookimpl
def luce_register_parts():
    return [
        PartSpec("encoder", "pictures", "broken_tower:make", Equivalence.BITS, processor="broken_model:make")
    ]
"""
TOWER = """
import torch
from luce_core.testing.pictures.tower import PictureEncoder

def make(context):
    (model,) = context.models.values()
    return Encoder(model)

class Encoder(PictureEncoder):
    pass
"""
MODEL = """
from attrs import evolve
from luce_core.testing.pictures.model import PictureProcessor, make_processor

def make(context):
    make_processor(context)
    return Processor(context)

class Processor(PictureProcessor):
    pass
"""
SUITE = """
from luce_core.testing.dense.model import write_dense_model
from luce_core.testing.encoder_contract import EncoderContract, Pair
from luce_core.testing.pictures import write_picture_model

class TestBroken(EncoderContract):
    hooks = "broken_hooks"
    more_hooks = ("luce_core.testing.dense.hooks",)

    def make_files(self, folder):
        return Pair(write_dense_model(folder / "text.gguf"), write_picture_model(folder / "p.gguf"))

    def make_wrong(self, folder):
        return write_picture_model(folder / "wrong.gguf", width=64)
"""


def failures(pytester, tower="", model="", only=()):
    """Names of the kit's tests that fail for these halves."""
    pytester.syspathinsert()
    modules = {
        "broken_hooks": HOOKS,
        "broken_tower": TOWER + dedent(tower),
        "broken_model": MODEL + dedent(model),
        "test_broken": SUITE,
    }
    pytester.makepyfile(**modules)
    run = pytester.inline_run("-q", "-p", "no:cacheprovider", "-k", " or ".join(only), "test_broken.py")
    reports = run.getreports("pytest_runtest_logreport")
    assert reports, "nothing was collected"
    return {report.nodeid.split("::")[-1] for report in reports if report.failed}


def test_an_unbroken_encoder_keeps_it(pytester):
    assert failures(pytester) == set()


TOWERS = {
    "forgets a row": (
        """
        class Encoder(PictureEncoder):
            def encode(self, items):
                for made in super().encode(items):
                    yield made if made is None else made[1:]
        """,
        "test_every_image_becomes_its_rows",
    ),
    "mixes images": (
        """
        class Encoder(PictureEncoder):
            def encode(self, items):
                seen = 0.0
                for made in super().encode(items):
                    yield made if made is None else made + seen
                    seen = seen if made is None else seen + made.mean()
        """,
        "test_an_image_is_encoded_alike_whatever_comes_before_it",
    ),
    "sees nothing": (
        """
        class Encoder(PictureEncoder):
            def encode(self, items):
                for made in super().encode(items):
                    yield made if made is None else torch.zeros_like(made)
        """,
        "test_an_image_is_encoded_alike_whatever_comes_before_it",
    ),
    "never stops": (
        """
        class Encoder(PictureEncoder):
            def encode(self, items):
                yield from [made for made in super().encode(items) if made is not None]
        """,
        "test_it_stops_between_pieces_of_work",
    ),
    "cannot be left": (
        """
        class Encoder(PictureEncoder):
            left = False
            def encode(self, items):
                try:
                    for made in super().encode(items):
                        yield made if made is None else made + self.left
                except GeneratorExit:
                    self.left = True
        """,
        "test_it_can_be_left_in_the_middle",
    ),
}
MODELS = {
    "imports torch": ("import torch", "test_its_processor_imports_neither_torch_nor_triton"),
    "counts wrong": (
        """
        class Processor(PictureProcessor):
            def prepare(self, pixels):
                return evolve(super().prepare(pixels), rows=3)
        """,
        "test_what_it_prepares_is_what_it_says",
    ),
    "hashes the size alone": (
        """
        class Processor(PictureProcessor):
            def prepare(self, pixels):
                return evolve(super().prepare(pixels), digest=bytes(16))
        """,
        "test_equal_images_have_equal_keys_and_others_have_none_in_common",
    ),
    "hashes at random": (
        """
        import os
        class Processor(PictureProcessor):
            def prepare(self, pixels):
                return evolve(super().prepare(pixels), digest=os.urandom(16))
        """,
        "test_equal_images_have_equal_keys_and_others_have_none_in_common",
    ),
    "keeps any size": (
        """
        class Processor(PictureProcessor):
            def __init__(self, context):
                super().__init__(context)
                self.most = 10**9
        """,
        "test_large_images_are_made_smaller",
    ),
    "names a token that is not there": (
        """
        class Processor(PictureProcessor):
            @property
            def placeholder(self):
                return "<think>" if planning() else "<|nowhere|>"

        def planning():
            import traceback
            return any("plan_media" in frame.filename for frame in traceback.extract_stack())
        """,
        "test_the_tokenizer_has_its_placeholder",
    ),
    "asks for the same whatever the size": (
        """
        class Processor(PictureProcessor):
            def __init__(self, context):
                super().__init__(context)
                self.workspace_bytes = 1
        """,
        "test_the_plan_counts_what_it_takes",
    ),
    "takes any file": (
        "def make(context): return Processor(context)",
        "test_a_file_that_does_not_go_with_the_model_is_named",
    ),
}


@pytest.mark.parametrize("name", TOWERS)
def test_an_encoder_is_caught_that(pytester, name):
    tower, expected = TOWERS[name]
    assert failures(pytester, tower=tower, only=[expected]) == {expected}


@pytest.mark.parametrize("name", MODELS)
def test_a_processor_is_caught_that(pytester, name):
    model, expected = MODELS[name]
    assert failures(pytester, model=model, only=[expected]) == {expected}
