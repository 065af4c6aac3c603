import httpx
import pytest

from luce_core.testing.pipeline import make_pipeline
from luce_core.testing.server import serving
from luce_core.testing.toy import ToyLaw, write_toy_model


@pytest.fixture
def serve(tmp_path):
    """serve(context=..., template=..., settings=..., front=..., **options) -> context manager of `Served`.

    front: what else `serving` takes; options: of the plan.
    """

    def make(*, context=512, template="", settings=None, max_queue=64, wrap=None, front=None, **options):
        path = write_toy_model(tmp_path / "toy.gguf", salt=7, context=context, template=template)
        pipeline = make_pipeline(path, options=options)
        return serving(pipeline, settings=settings, max_queue=max_queue, wrap=wrap, **(front or {}))

    return make


@pytest.fixture
def served(serve):
    with serve() as one:
        yield one


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """One server for all tests of a module that change nothing in it."""
    path = write_toy_model(tmp_path_factory.mktemp("standing") / "toy.gguf", salt=7, context=512)
    with serving(make_pipeline(path)) as one:
        yield one


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


@pytest.fixture
def law(served):
    return ToyLaw(served.service.face.tokenizer.vocab_size, salt=7)
