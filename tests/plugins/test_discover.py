"""Discovery over made-up installed distributions: a bad plugin becomes a record and harms no other."""

import importlib_metadata as metadata
import pytest

from luce_core import plugins
from luce_core.errors import PluginError, UsageError
from luce_core.testing.fake_plugins import install

GOOD = """
    from luce_core.contracts import API, ArchSpec, PluginInfo
    from luce_core.hookspecs import hookimpl

    @hookimpl
    def luce_plugin_info():
        return PluginInfo(name={name!r}, api=API)

    @hookimpl
    def luce_register_archs():
        return [ArchSpec(({name!r},), "m:describe", "m:build")]
"""


class Box:
    """A folder of installed distributions and a discovery that sees nothing else."""

    def __init__(self, folder):
        self.folder = folder
        self.number = 0

    def add(self, name, source=GOOD, *, distribution=None, **more):
        self.number += 1
        module = f"boxed_{self.folder.parent.name}_{self.folder.name}_{self.number}".replace("-", "_")
        distribution = distribution or f"luce-{name}"
        install(
            self.folder,
            distribution,
            plugins={name: module},
            modules={module: source.replace("{name!r}", repr(name))},
            **more,
        )

    def discover(self, **options):
        return plugins.discover(distributions=metadata.distributions(path=[str(self.folder)]), **options)


@pytest.fixture
def box(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return Box(tmp_path)


def status(registry, name):
    return registry.record(name).status


def test_nothing_installed_leaves_the_core_alone(box):
    registry = box.discover()
    assert [record.name for record in registry.records] == ["core"]
    assert registry.names("scheduler") == ["fair"]
    assert registry.names("executor") == ["eager"]
    assert registry.archs() == []


def test_a_sound_plugin_is_loaded_with_its_distribution(box):
    box.add("glim")
    registry = box.discover()
    record = registry.record("glim")
    assert (record.status, record.distribution, record.version) == ("loaded", "luce-glim", "1.0")
    assert registry.arch("glim").plugin == "glim"
    assert record.title == "plugin 'glim' (luce-glim 1.0)"


def test_a_removed_plugin_takes_its_declarations_with_it(box):
    box.add("glim")
    assert box.discover().names("arch") == ["glim"]
    for path in box.folder.glob("*.dist-info/entry_points.txt"):
        path.unlink()
    registry = box.discover()
    assert registry.names("arch") == []
    with pytest.raises(PluginError, match="pip install luce-arch-glim"):
        registry.arch("glim")


@pytest.mark.parametrize("requirement", ["luce-core>=99", "luce_core<0.0.1", "Luce.Core==0.0.7"])
def test_unmet_requirement_is_found_before_import(box, requirement):
    box.add("glim", "raise SystemError('imported')", requires=[requirement])
    record = box.discover().record("glim")
    assert record.status == "incompatible"
    assert "it needs luce-core" in record.reason
    assert f"this is {plugins.luce_core.__version__}" in record.reason


def test_requirements_are_judged_against_the_given_version_prereleases_included(box):
    box.add("glim", requires=["luce-core>=2.0rc1,<3"])
    assert status(box.discover(core_version="2.0rc1"), "glim") == "loaded"
    assert status(box.discover(core_version="3.0"), "glim") == "incompatible"


def test_requirements_of_other_packages_and_of_inactive_markers_do_not_count(box):
    elsewhere = ["no-such-package>=99", "luce-core>=99; extra == 'x'", "luce-core>=99; python_version < '3'"]
    box.add("glim", requires=elsewhere)
    assert status(box.discover(), "glim") == "loaded"


def test_an_invalid_requirement_is_named(box):
    box.add("glim", requires=["luce-core >>> 1"])
    record = box.discover().record("glim")
    assert record.status == "broken"
    assert "'luce-core >>> 1'" in record.reason


def test_another_api_number_is_incompatible(box):
    box.add("glim", GOOD.replace("api=API", "api=API + 1"))
    record = box.discover().record("glim")
    assert record.status == "incompatible"
    assert "hook API 2; this core speaks 1" in record.reason
    assert "Upgrade luce-core" in record.reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("raise RuntimeError('boom')", "importing it raised RuntimeError: boom"),
        ("raise SystemExit(3)", "importing it raised SystemExit: 3"),
        ("def broken(:", "importing it raised SyntaxError"),
        ("x = 1", "does not implement luce_plugin_info"),
        (GOOD.replace("PluginInfo(name={name!r}, api=API)", "None"), "returned None, wanted a PluginInfo"),
        (GOOD.replace("PluginInfo(name={name!r}, api=API)", "1 / 0"), "raised ZeroDivisionError"),
        (GOOD.replace("Info(name={name!r}", "Info(name='other'"), "'glim' and its PluginInfo 'other'"),
        (GOOD.replace("[ArchSpec", "ArchSpec").replace('build")]', 'build")'), "wanted a list of ArchSpec"),
        (GOOD.replace('[ArchSpec(({name!r},), "m:describe", "m:build")]', "['glim']"), "'glim' in its"),
        (GOOD.replace('"m:describe"', '"m.describe"'), "describe is 'm.describe', wanted 'module:callable'"),
        (GOOD.replace("({name!r},)", "('a', 'a')"), "declares 'arch.a' twice"),
        (GOOD.replace("register_archs", "register_arch"), "Did you mean 'luce_register_archs'?"),
        (GOOD.replace("archs()", "archs(gpu)"), "asks for 'gpu', but that hook takes no arguments"),
        (GOOD.replace("@hookimpl\n    def luce_reg", "def luce_reg"), "not marked with @hookimpl"),
        (
            GOOD.replace("@hookimpl\n    def luce_reg", "@hookimpl(wrapper=True)\n    def luce_reg"),
            "hook wrapper",
        ),
        (
            GOOD.replace("api=API)", "api=API, options=int)"),
            "wanted a pydantic model",
        ),
    ],
)
def test_a_broken_plugin_is_a_record_with_the_reason(box, source, reason):
    box.add("glim", source)
    box.add("sound")
    registry = box.discover()
    record = registry.record("glim")
    assert record.status == "broken"
    assert reason in record.reason
    assert status(registry, "sound") == "loaded"
    assert registry.names("arch") == ["sound"]


def test_an_unknown_hook_is_allowed_when_marked_optional(box):
    box.add(
        "glim",
        GOOD + "\n    @hookimpl(optionalhook=True)\n    def luce_register_wonders():\n        return []\n",
    )
    registry = box.discover()
    assert status(registry, "glim") == "loaded"
    assert "luce_register_wonders" not in registry.hooks


def test_two_distributions_with_one_plugin_name_are_both_kept_out(box):
    box.add("glim", distribution="luce-glim")
    box.add("glim", distribution="other-glim")
    registry = box.discover()
    records = [record for record in registry.records if record.name == "glim"]
    assert [record.status for record in records] == ["duplicate", "duplicate"]
    reasons = {record.distribution: record.reason for record in records}
    assert "other-glim" in reasons["luce-glim"]
    assert "luce-glim" in reasons["other-glim"]
    assert registry.names("arch") == []


def test_nobody_may_take_the_name_of_the_core(box):
    box.add("core")
    registry = box.discover()
    assert [record.status for record in registry.records if record.name == "core"] == ["loaded", "duplicate"]
    assert registry.record("core").distribution == "luce-core"


def test_blocked_and_not_allowed_plugins_are_not_imported(box):
    box.add("glim", "raise SystemError('imported')")
    box.add("sound")
    registry = box.discover(block=["glim"])
    record = registry.record("glim")
    assert (record.status, record.reason) == ("blocked", "--plugin-block names it")
    registry = box.discover(allow=["sound"])
    assert registry.record("glim").reason == "--plugin-allow does not name it"
    assert status(registry, "sound") == "loaded"


def test_a_misspelt_list_is_noticed(box):
    box.add("glim")
    registry = box.discover(block=["glin"])
    assert registry.notices == ("--plugin-block names 'glin', which is not installed. Did you mean 'glim'?",)
    with pytest.raises(UsageError, match="'core' is the core itself"):
        box.discover(block=["core"])


def test_a_named_plugin_that_did_not_load_is_an_error_with_all_reasons(box):
    box.add("glim", "raise RuntimeError('boom')")
    box.add("sound", requires=["luce-core>=99"])
    with pytest.raises(PluginError) as caught:
        box.discover(named=["glim", "sound", "absent"])
    text = str(caught.value)
    assert "Plugin 'glim' (luce-glim 1.0) was asked for and is broken: importing it raised Runtime" in text
    assert "Plugin 'sound' (luce-sound 1.0) was asked for and is incompatible: it needs luce-core>=99" in text
    assert "Plugin 'absent' was asked for and is not installed" in text


def test_naming_a_plugin_allows_it(box):
    box.add("glim")
    box.add("sound")
    registry = box.discover(allow=["sound"], named=["glim"])
    assert status(registry, "glim") == "loaded"


def test_a_plugin_name_must_be_typable(box):
    box.add("Glim_X")
    assert "not kebab-case" in box.discover().record("Glim_X").reason


def test_damaged_metadata_of_a_plugin_is_its_own_misfortune(box):
    box.add("sound")
    bad = box.folder / "luce_bad-1.0.dist-info"
    bad.mkdir()
    (bad / "METADATA").write_text("Metadata-Version: 2.1\nName: luce-bad\nVersion: 1.0\n")
    (bad / "entry_points.txt").write_text("[luce_core.plugins]\nthis line has no value\n")
    bare = box.folder / "luce_bare-1.0.dist-info"
    bare.mkdir()
    (bare / "entry_points.txt").write_text("[luce_core.plugins]\nbare = no_such_module_anywhere\n")
    registry = box.discover()
    assert status(registry, "sound") == "loaded"
    assert "entry_points.txt is malformed" in registry.record("luce-bad").reason
    assert registry.record("bare").version == "unknown version"


def test_damaged_metadata_of_a_stranger_is_ignored(box):
    bad = box.folder / "stranger-1.0.dist-info"
    bad.mkdir()
    (bad / "entry_points.txt").write_text("[console_scripts]\nthis line has no value\n")
    assert [record.name for record in box.discover().records] == ["core"]


def test_order_does_not_depend_on_installation(box):
    for name in ("zeta", "alpha", "mid"):
        box.add(name)
    registry = box.discover()
    assert [record.name for record in registry.loaded()] == ["core", "alpha", "mid", "zeta"]


def test_a_part_of_a_plugin_that_did_not_load_says_why(box):
    box.add("glim", "raise RuntimeError('boom')")
    with pytest.raises(PluginError) as caught:
        box.discover().part("scheduler", "glim")
    assert "scheduler 'glim' is part of plugin 'glim' (luce-glim 1.0), which is broken: importing" in str(
        caught.value
    )


# --- the static index


def test_the_index_is_read_without_importing(box):
    box.add("glim", "raise SystemError('imported')", provides=["arch.glim", "arch.glimmer"])
    registry = box.discover(block=["glim"])
    assert registry.provides["arch.glimmer"] == ("luce-glim",)
    with pytest.raises(PluginError) as caught:
        registry.arch("glimmer")
    part_of = "is part of plugin 'glim' (luce-glim 1.0), which is blocked: --plugin-block names it"
    assert part_of in str(caught.value)


def test_what_is_missing_is_said_with_the_nearest_name_and_the_choices(box):
    box.add("glim")
    with pytest.raises(PluginError) as caught:
        box.discover().arch("glin")
    text = str(caught.value)
    assert "No installed plugin provides architecture 'glin'" in text
    assert "pip install luce-arch-glin" in text
    assert "Did you mean 'glim'?" in text
    assert "Installed: glim." in text


@pytest.mark.parametrize(
    ("key", "package"),
    [
        ("arch.bailingmoe3", "luce-arch-bailing"),
        ("arch.clip.qwen3vl_merger", "luce-arch-qwen35"),
        ("arch.deepseek4", "luce-arch-deepseek4"),
        ("arch.deepseek41", "luce-arch-deepseek4"),
        ("arch.gemma4", "luce-arch-gemma"),
        ("arch.qwen2", "luce-arch-llama"),
        ("arch.qwen35", "luce-arch-qwen35"),
        ("arch.qwen35moe", "luce-arch-qwen35"),
        ("arch.qwen3moe", "luce-arch-qwen3"),
        ("device.cuda:1", "luce-backend-triton"),
        ("executor.cuda-graphs", "luce-backend-triton"),
        ("drafter.dflash", "luce-dflash"),
        ("scheduler.my_own", "luce-my-own"),
    ],
)
def test_missing_for_follows_the_naming_scheme(box, key, package):
    assert f"pip install {package} " in box.discover().missing_for(key)


def test_one_declaration_by_two_plugins_is_an_error_when_asked_for(box):
    box.add("glim")
    box.add("glam", GOOD.replace("(({name!r},)", "(('glim',)"))
    registry = box.discover()
    assert status(registry, "glam") == "loaded"
    with pytest.raises(PluginError) as caught:
        registry.arch("glim")
    assert "declared by plugin 'glam' (luce-glam 1.0) and plugin 'glim' (luce-glim 1.0)" in str(caught.value)
