"""Any plugins in any order of installation plan the same thing; any config file is read or refused."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.contracts import PlanPatch
from luce_core.core_options import CoreOptions
from luce_core.errors import PlanError, UsageError
from luce_core.options import load_options
from luce_core.plan_fields import Fields
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin

BARE = from_modules([])
NAMES = ("a", "b", "c", "d")
FIELDS = st.sampled_from(["threads", "engine.row_budget", "parts.drafter", "nonsense"])
VALUES = st.sampled_from([1, 2, ("x",), "y", -1])
PATCHES = st.builds(PlanPatch, FIELDS, VALUES, st.just("why"))
PLUGINS = st.fixed_dictionaries(
    {
        name: st.tuples(
            st.lists(st.sampled_from([other for other in NAMES if other != name]), max_size=2, unique=True),
            st.lists(PATCHES, max_size=2),
        )
        for name in NAMES
    }
)


def outcome(described, order):
    """What the fields become when these plugins are installed in this order."""

    def patching(patches):
        return lambda plan, devices: list(patches)

    modules = [
        make_plugin(name, after=tuple(described[name][0]), luce_extend_plan=patching(described[name][1]))
        for name in order
    ]
    registry = from_modules(modules)
    fields = Fields(load_options(registry, {}, {}, []), registry)
    fields.problems += registry.problems
    for bound in registry.hooks["luce_extend_plan"]:
        for patch in bound(plan=None, devices=()):
            fields.apply(bound.plugin, patch)
    return fields


@settings(max_examples=25, deadline=None)
@given(PLUGINS)
def test_the_order_of_installation_never_decides(described):
    first = outcome(described, NAMES)
    for order in list(permutations(NAMES))[1::6]:
        other = outcome(described, order)
        assert other.values == first.values
        assert other.origin == first.origin
        assert other.problems == first.problems


def comes_after(described, later, earlier):
    reached, queue = set(), [later]
    while queue:
        for name in described[queue.pop()][0]:
            if name not in reached:
                reached.add(name)
                queue.append(name)
    return earlier in reached


@settings(max_examples=100, deadline=None)
@given(PLUGINS)
def test_two_plugins_disagree_silently_only_where_one_comes_after_the_other(described):
    fields = outcome(described, NAMES)
    if fields.problems:
        return
    for one in NAMES:
        for two in NAMES:
            for mine in described[one][1]:
                for theirs in described[two][1]:
                    if one != two and mine.field == theirs.field and mine.value != theirs.value:
                        same = {mine.value, theirs.value} <= {"y", ("y",)}
                        ordered = comes_after(described, one, two) or comes_after(described, two, one)
                        repeated = len({p.value for p in described[one][1] if p.field == mine.field}) > 1
                        assert same or ordered or repeated, (one, two, mine, theirs)


TOML_VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=6)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


def toml(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(char):08x}" for char in value) + '"'
    return str(value)


KEYS = st.sampled_from([name.replace("_", "-") for name in CoreOptions.model_fields])


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, TOML_VALUES, max_size=4))
def test_any_config_file_is_read_or_refused_by_line(tmp_path_factory, values):
    values.pop("config", None)
    path = tmp_path_factory.mktemp("config") / "luce.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items()), encoding="utf-8")
    try:
        options = load_options(BARE, {}, {}, [path])
    except UsageError as error:
        complaints = str(error)
    else:
        for key in values:
            assert options.origin[key.replace("-", "_")].source == "file"
        return
    assert any(f"luce.toml: {key}" in complaints or "profile" in complaints for key in values)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([f"LUCE_{n.upper()}" for n in CoreOptions.model_fields]), st.text()))
def test_any_environment_is_read_or_refused_by_name(environment):
    environment.pop("LUCE_CONFIG", None)
    try:
        options = load_options(BARE, {}, environment, [])
    except UsageError as error:
        complaints = str(error)
    else:
        assert all(options.origin[name.removeprefix("LUCE_").lower()].source == "env" for name in environment)
        return
    assert any(name in complaints for name in environment) or "profile" in complaints


def test_a_plan_error_lists_every_problem_on_a_line_of_its_own(plan):
    with pytest.raises(PlanError) as caught:
        plan(scheduler="x", executor="y")
    assert len(str(caught.value).splitlines()) == len(caught.value.problems) == 2
