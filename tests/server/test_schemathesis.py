"""Requests made from the served document, right ones and wrong ones: no 5xx, no hang, answers as described.

A small and repeatable part of what `tests/fuzz/fuzz_api.py` does for as long as one likes.
"""

from pathlib import Path

import httpx
import pytest
import requests
import schemathesis
import schemathesis.openapi
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from luce_core.server.openapi import OPERATIONS
from luce_core.testing.pipeline import make_pipeline
from luce_core.testing.server import serving
from luce_core.testing.toy import write_toy_model

CONTEXT = 48  # keeps answers short where a request sets no length
TIMEOUT_S = 60
CONFIG = schemathesis.Config.from_path(Path(__file__).parents[1] / "fuzz" / "schemathesis.toml")
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
EXAMPLES = {"GET": 2, "/tokenize": 10, "/detokenize": 10, "/v1/completions": 12, "/v1/chat/completions": 8}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = write_toy_model(tmp_path_factory.mktemp("small") / "toy.gguf", salt=7, context=CONTEXT)
    with serving(make_pipeline(path)) as served:
        yield served
        served.engine.blocks.check_integrity()


@pytest.fixture(scope="module")
def schema(small):
    return schemathesis.openapi.from_url(f"{small.url}/openapi.json", config=CONFIG)


MADE = [(one.method, one.path, schemathesis.GenerationMode.POSITIVE) for one in OPERATIONS]
MADE += [(one.method, one.path, schemathesis.GenerationMode.NEGATIVE) for one in OPERATIONS if one.body]


@pytest.mark.parametrize(("method", "path", "mode"), MADE)
def test_what_the_document_leads_to(small, schema, method, path, mode):
    operation = schema[path][method]
    session = requests.Session()

    @given(operation.as_strategy(mode))
    @settings(
        max_examples=EXAMPLES[path if method == "POST" else method],
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case):
        case.call_and_validate(small.url, session, checks=CHECKS, timeout=TIMEOUT_S)

    with session:
        run()
    assert httpx.get(f"{small.url}/health", timeout=TIMEOUT_S).json()["status"] == "ok"
