"""A plugin cannot weaken a contract without saying so."""

import pytest

from luce_core.testing.contract import Contract, kit_tests


class Kit(Contract):
    """Stands for a contract of the kit: `__module__` is what makes it one."""

    __module__ = "luce_core.testing.pretend"
    wanted: str

    def test_one(self):
        pass

    def test_two(self):
        pass


def subclass(**body):
    return type("TestPart", (Kit,), {"wanted": "x", "__module__": "somewhere", **body})


def test_a_plain_subclass_keeps_all_tests():
    assert kit_tests(subclass()) == {"test_one", "test_two"}
    assert subclass(test_mine=lambda self: None).test_mine


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"test_one": lambda self: None}, "replaces the kit's 'test_one'"),
        ({"test_one": None}, "replaces the kit's 'test_one'"),
        ({"exceptions": {"test_three": "there is no such thing"}}, "'test_three', no test of its contract"),
        ({"exceptions": {"test_one": "flaky"}}, "Say it in a sentence"),
        ({"exceptions": {"test_one": ""}}, "Say it in a sentence"),
        ({"__test__": False}, "__test__ = False"),
        ({"pytestmark": pytest.mark.skip}, "marked 'skip'"),
        ({"pytestmark": [pytest.mark.slow, pytest.mark.xfail(reason="later")]}, "marked 'xfail'"),
    ],
)
def test_weakening_a_contract_fails_when_the_class_is_made(body, words):
    with pytest.raises(TypeError, match=words):
        subclass(**body)


def test_leaving_out_what_a_contract_asks_for_fails():
    with pytest.raises(TypeError, match="leaves out 'wanted'"):
        type("TestPart", (Kit,), {"__module__": "somewhere"})


def test_a_mixin_cannot_replace_a_test_either():
    class Mixin:
        def test_one(self):
            pass

    with pytest.raises(TypeError, match="replaces the kit's 'test_one'"):
        type("TestPart", (Mixin, Kit), {"wanted": "x", "__module__": "somewhere"})


SUITE = """
import pytest
from luce_core.testing.contract import Contract

class Kit(Contract):
    __module__ = "luce_core.testing.pretend"
    def test_good(self): pass
    def test_bad(self): assert False, "broken"

class TestPart(Kit):
    exceptions = {EXCEPTIONS}
"""


def test_an_exception_is_a_strict_xfail_with_its_reason(pytester):
    reason = '{"test_bad": "the part cannot do this yet"}'
    pytester.makepyfile(SUITE.replace("{EXCEPTIONS}", reason))
    outcome = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rx")
    outcome.assert_outcomes(passed=1, xfailed=1)
    outcome.stdout.fnmatch_lines(["*the part cannot do this yet*"])


def test_an_exception_that_is_not_needed_fails(pytester):
    pytester.makepyfile(SUITE.replace("{EXCEPTIONS}", '{"test_good": "said to be broken here"}'))
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(failed=2)


def test_marking_a_kit_test_from_a_conftest_is_refused(pytester):
    pytester.makepyfile(SUITE.replace("{EXCEPTIONS}", "{}"))
    pytester.makeconftest(
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items: item.add_marker(pytest.mark.skip)\n"
    )
    outcome = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert outcome.ret == pytest.ExitCode.USAGE_ERROR
    outcome.stderr.fnmatch_lines(["*a test of the kit, is marked 'skip'*"])
