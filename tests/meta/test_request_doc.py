"""docs/request.md names functions that exist."""

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(luce_core/[\w/]+)\.py:([\w.]+)`", (ROOT / "docs/request.md").read_text())


def test_the_page_names_the_whole_path():
    assert len(NAMED) >= 11


@pytest.mark.parametrize(("module", "name"), NAMED, ids=lambda value: value.rsplit("/", 1)[-1])
def test_every_hop_exists(module, name):
    found = reduce(getattr, name.split("."), importlib.import_module(module.replace("/", ".")))
    assert callable(found)
