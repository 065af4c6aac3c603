from pathlib import Path

import pytest

from luce_core.testing.pipeline import EngineRig, make_pipeline
from luce_core.testing.toy import ToyLaw, write_toy_model

VOCAB = 300


@pytest.fixture(params=["slots", "pages", "window"])
def kind(request):
    """The three kinds of toy state."""
    return request.param


@pytest.fixture
def toy(tmp_path: Path):
    """toy(kind="slots", drafters=..., **options) -> (EngineRig, ToyLaw)."""

    def make(kind="slots", drafters=(), context=256, **options):
        shape = {"slots": {}, "pages": {"slots": False}, "window": {"slots": True, "window": 24}}[kind]
        path = write_toy_model(tmp_path / f"{kind}.gguf", salt=7, context=context, **shape)
        pipeline = make_pipeline(path, options=options, drafters=drafters)
        law = ToyLaw(
            pipeline.target.backend.spec.vocab,
            salt=7,
            slots=shape.get("slots", True),
            window=shape.get("window", 0),
        )
        return EngineRig(pipeline), law

    return make
