"""Whatever a plugin returns, raises or asks for: a record with a reason, and everyone else is served."""

import importlib_metadata as metadata
from hypothesis import given, settings
from hypothesis import strategies as st

from luce_core.contracts import ArchSpec, Equivalence, OpLayer, PartSpec, PluginInfo, Profile
from luce_core.plugin_checks import DECLARING, Candidate, Found
from luce_core.plugins import _core_find, _registry, discover
from luce_core.testing.fake_plugins import make_plugin

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([object(), len, PluginInfo, iter([1])]),
)
KINDS = st.sampled_from(["drafter", "scheduler", "chat"])
SPECS = st.one_of(
    st.builds(PartSpec, KINDS, ODD, ODD, st.just(Equivalence.BITS)),
    st.builds(ArchSpec, ODD, ODD, ODD),
    st.builds(OpLayer, ODD, ODD, ODD),
    st.builds(Profile, ODD, ODD, ODD),
)
ANSWERS = st.one_of(ODD, st.lists(st.one_of(ODD, SPECS), max_size=3))


def registry_of(modules):
    candidates = [Candidate(name, lambda module=module: module) for name, module in modules.items()]
    finds = [Found(candidate, candidate.record("loaded")) for candidate in candidates]
    return _registry([_core_find(), *finds], {}, frozenset())


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(DECLARING)), ANSWERS, max_size=3))
def test_any_answer_of_any_hook(answers):
    registry = registry_of({"odd": make_plugin("odd", **answers), "sound": make_plugin("sound")})
    records = {record.name: record for record in registry.records}
    assert records["sound"].status == records["core"].status == "loaded"
    assert records["odd"].status in ("loaded", "broken")
    assert bool(records["odd"].reason) == (records["odd"].status == "broken")
    if records["odd"].status == "broken":
        suppliers = {item.plugin for given_by in registry.declared.values() for item in given_by}
        assert suppliers == {"core"}


@settings(max_examples=100, deadline=None)
@given(
    st.builds(PluginInfo, name=ODD, api=ODD, options=ODD, after=ODD, conflicts=ODD)
    | st.builds(PluginInfo, name=st.just("odd"), api=st.just(1), options=ODD, after=ODD, conflicts=ODD)
)
def test_any_plugin_info(info):
    module = make_plugin("odd", luce_plugin_info=lambda: info)
    record = registry_of({"odd": module, "sound": make_plugin("sound")}).record("odd")
    assert record.status in ("loaded", "broken", "incompatible")


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=200))
def test_any_bytes_as_metadata(tmp_path_factory, entry_points, header):
    folder = tmp_path_factory.mktemp("site")
    info = folder / "odd-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_bytes(b"[luce_core.plugins]\n" + entry_points)
    (info / "METADATA").write_bytes(header)
    registry = discover(distributions=metadata.distributions(path=[str(folder)]))
    assert registry.record("core").status == "loaded"
    assert all(r.status != "loaded" for r in registry.records if r.name != "core")
