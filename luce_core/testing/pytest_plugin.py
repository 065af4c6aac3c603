"""Loaded by pytest wherever the core is installed: makes the kit's rules hold. Imports nothing heavy."""

from __future__ import annotations

import sys

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "luce_core.testing.contract" in sys.modules:  # otherwise nothing of the kit was subclassed
        from luce_core.testing.contract import apply_exceptions

        apply_exceptions(items)
