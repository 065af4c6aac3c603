"""Hooks, options and version: what the documents say is what the code does."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import luce_core
from luce_core import docs, hookspecs
from luce_core.core_options import CoreOptions
from luce_core.plugin_checks import DECLARING

ROOT = Path(__file__).parents[2]
HOOKS = [name for name in vars(hookspecs) if name.startswith("luce_")]


def test_there_are_hooks():
    assert len(HOOKS) == 15


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_test(hook):
    tests = {
        node.name
        for path in (ROOT / "tests" / "hooks").glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert f"test_hook_{hook}" in tests


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_exact_signature(hook):
    function = getattr(hookspecs, hook)
    signature = inspect.signature(function)
    arguments = ", ".join(f"{name}: {p.annotation}" for name, p in signature.parameters.items())
    exact = f"{hook}({arguments}) -> {signature.return_annotation}"
    assert f"```python\n{exact}\n```" in (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_few_typed_arguments_a_prefix_and_a_purpose(hook):
    function = getattr(hookspecs, hook)
    parameters = inspect.signature(function).parameters.values()
    assert len(parameters) <= 4
    assert all(p.default is p.empty and p.annotation is not p.empty for p in parameters)
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty
    assert re.match(r"luce_(plugin_info|(register|extend|check)_\w+|\w+_(started|stopping|finished))$", hook)
    assert (function.__doc__ or "").strip()


def test_every_register_hook_is_read():
    assert set(DECLARING) | {"luce_register_devices"} == {h for h in HOOKS if h.startswith("luce_register")}


@pytest.mark.parametrize("name", ["hooks.md", "metrics.md", "options.md"])
def test_generated_pages_are_up_to_date(name):
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == docs.pages()[name], "run: python -m luce_core.docs"


def test_every_option_is_on_its_page():
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    for name in CoreOptions.model_fields:
        assert f"`--{name.replace('_', '-')}`" in page
        assert f"`LUCE_{name.upper()}`" in page


def test_the_pages_are_written_where_they_are_asked(tmp_path):
    docs.main(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(docs.pages())


def test_the_version_is_the_packages():
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == luce_core.__version__
