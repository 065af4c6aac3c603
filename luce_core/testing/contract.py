"""The base of every contract of the kit: test classes a plugin subclasses, which it cannot weaken without
saying so.

    class TestGlimmer(ArchContract):
        hooks = "luce_glimmer.hooks"

        def make_model(self, path): ...

Rules, checked when the subclass is made: no test of the kit is overridden, removed or skipped; what the
contract asks for is filled in; a test that cannot hold is named in `exceptions` with the reason and then
must fail (strict xfail).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

KIT = "luce_core.testing."
SKIPPING = frozenset({"skip", "skipif", "xfail"})


class Contract:
    """Subclass a contract, not this. Every public name a contract declares without a value must be filled
    in.
    """

    exceptions: ClassVar[Mapping[str, str]] = {}
    """Kit test -> why this part cannot pass it, in words users may read."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if cls.__module__.startswith(KIT):
            return
        tests = kit_tests(cls)
        for name in sorted(name for name in tests if not _from_kit(cls, name)):
            raise TypeError(
                f"{cls.__qualname__} replaces the kit's {name!r}. "
                f"Mend the part, or add {name!r} to `exceptions` with the reason."
            )
        for name in set(cls.exceptions) - tests:
            raise TypeError(f"{cls.__qualname__} excepts {name!r}, no test of its contract: {sorted(tests)}.")
        for name, reason in cls.exceptions.items():
            if len(reason.split()) < 3:
                raise TypeError(f"{cls.__qualname__} excepts {name!r}: {reason!r}. Say it in a sentence.")
        if not getattr(cls, "__test__", True):
            raise TypeError(f"{cls.__qualname__} sets __test__ = False; a contract is tested or not claimed.")
        for mark in _marks(cls):
            if mark.name in SKIPPING:
                raise TypeError(f"{cls.__qualname__} is marked {mark.name!r}; use `exceptions` instead.")
        for name in _asked(cls):
            if not hasattr(cls, name):
                raise TypeError(f"{cls.__qualname__} leaves out {name!r}, which its contract asks for.")


def kit_tests(cls: type) -> set[str]:
    """Names of the tests the kit gives to a contract class."""
    return {
        name
        for base in cls.__mro__
        if base.__module__.startswith(KIT)
        for name in vars(base)
        if name.startswith("test_")
    }


def _from_kit(cls: type, name: str) -> bool:
    """Whether the kit's own test is what `name` means on this class."""
    owner = next(base for base in cls.__mro__ if name in vars(base))
    return owner.__module__.startswith(KIT)


def _asked(cls: type) -> set[str]:
    """Names annotated without a value in the kit's classes above."""
    return {
        name
        for base in cls.__mro__
        if base.__module__.startswith(KIT)
        for name in inspect.get_annotations(base)
        if not name.startswith("_")
    }


def _marks(cls: type) -> Iterator[pytest.Mark]:
    marks: Any = getattr(cls, "pytestmark", [])
    for mark in marks if isinstance(marks, (list, tuple)) else [marks]:
        yield mark.mark if isinstance(mark, pytest.MarkDecorator) else mark


def apply_exceptions(items: list[pytest.Item]) -> None:
    """Exceptions become strict xfails; a kit test that somebody marked to be skipped is an error."""
    for item in items:
        cls = getattr(item, "cls", None)
        if not (isinstance(cls, type) and issubclass(cls, Contract)):
            continue
        name = getattr(item, "originalname", item.name)
        if name not in kit_tests(cls):
            continue
        skipping = next((mark.name for mark in item.iter_markers() if mark.name in SKIPPING), None)
        if skipping:
            raise pytest.UsageError(
                f"{item.nodeid}, a test of the kit, is marked {skipping!r}; use `exceptions`."
            )
        if name in cls.exceptions:
            item.add_marker(pytest.mark.xfail(strict=True, reason=cls.exceptions[name]))
