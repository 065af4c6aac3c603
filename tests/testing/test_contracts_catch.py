"""Each rule of each contract catches a plugin that breaks it, and the unbroken plugin passes them all."""

from importlib import import_module
from textwrap import dedent

import pytest

# Imported here so that the runs inside these tests share one copy of them.
KIT = ("arch", "drafter_contract", "op_layer", "plugin", "toy.describe", "toy.hooks", "toy.network")
for part in KIT:
    import_module(f"luce_core.testing.{part}")

HOOKS = """
from luce_core.contracts import *
from luce_core.hookspecs import hookimpl
from luce_core.testing.toy.hooks import luce_register_ops

@hookimpl
def luce_plugin_info():
    return PluginInfo("broken", API)

@hookimpl
def luce_register_archs():
    return [ArchSpec(("toy",), DESCRIBE, "broken_net:build")]
"""

NET = """
import torch
from luce_core.testing.toy import describe as toy
from luce_core.testing.toy.network import ToyNetwork, mix

def describe(header, cache):
    return toy.describe(header, cache)

def build(spec, weights, ops):
    return Net(spec, weights, ops)

class Net(ToyNetwork):
    pass
"""

ARCH = """
from luce_core.testing.arch import ArchContract
from luce_core.testing.toy import write_toy_model

class TestBroken(ArchContract):
    hooks = "broken_hooks"
    layers = ("toy",)
    tolerance = 0.0
    ops_only = OPS_ONLY
    tree_nodes = 3

    def make_model(self, folder):
        return write_toy_model(folder / "toy.gguf")
"""


def failures(pytester, suite, only=(), **modules):
    """Names of the kit's tests that fail (or cannot be set up) for these modules. only: the tests to run."""
    pytester.syspathinsert()
    for name, source in modules.items():
        pytester.makepyfile(**{name: dedent(source)})
    pytester.makepyfile(test_broken=dedent(suite))
    run = pytester.inline_run("-q", "-p", "no:cacheprovider", "-k", " or ".join(only), "test_broken.py")
    reports = run.getreports("pytest_runtest_logreport")
    assert reports, "nothing was collected"
    return {r.nodeid.split("::")[-1].partition("[")[0] for r in reports if r.failed}


def arch(pytester, only, net="", ops_only="False", prelude=""):
    return failures(
        pytester,
        prelude + ARCH.replace("OPS_ONLY", ops_only),
        only,
        broken_hooks=HOOKS.replace("DESCRIBE", '"broken_net:describe"'),
        broken_net=NET + dedent(net),
    )


def test_the_unbroken_toy_keeps_the_arch_contract(pytester):
    clean = NET.replace("import torch\n", "").replace(
        "from luce_core.testing.toy.network import ToyNetwork, mix", ""
    )
    clean = clean.partition("class Net")[0].replace(
        "    return Net(spec, weights, ops)",
        "    from luce_core.testing.toy.network import ToyNetwork\n    return ToyNetwork(spec, weights, ops)",
    )
    hooks = HOOKS.replace("DESCRIBE", '"broken_net:describe"')
    assert (
        failures(pytester, ARCH.replace("OPS_ONLY", "False"), broken_hooks=hooks, broken_net=clean) == set()
    )


BROKEN_NETS = {
    "forgets what earlier chunks wrote": (
        """
        def seen(self, batch):
            own = torch.empty(len(batch.token), dtype=torch.int64)
            bounds = batch.query_start.tolist()
            for a, b in zip(bounds, bounds[1:]):
                own[a:b] = mix(batch.token[a:b].long()).cumsum(0)
            return own & 0xFFFFFFFF
        Net._seen = seen
        """,
        {
            "test_chunks_of_a_prompt_give_the_logits_of_the_whole",
            "test_decoding_one_by_one_gives_the_logits_of_the_whole",
        },
    ),
    "looks at its batch-mates": (
        """
        plain = ToyNetwork._seen
        Net._seen = lambda self, batch: plain(self, batch) + len(batch.slot) - 1
        """,
        {"test_batch_mates_change_nothing"},
    ),
    "takes every tree for a chain": (
        """
        plain = ToyNetwork._rolled
        def rolled(self, batch, slot):
            from attrs import evolve
            if batch.phase == "held":
                starts = batch.query_start.long()[batch.seq.long()]
                chain = torch.arange(len(batch.token)) - starts - 1
                batch = evolve(batch, parent=chain.int())
            return plain(self, batch, slot)
        Net._rolled = rolled
        """,
        {"test_every_tree_and_every_accepted_path_continues_like_a_fresh_run"},
    ),
    "changes state while rows are only held": (
        """
        plain = ToyNetwork._rolled
        def rolled(self, batch, slot):
            out = plain(self, batch, slot)
            if batch.phase == "held":
                slot.state[batch.slot.long()[batch.seq.long()], 0] = out
            return out
        Net._rolled = rolled
        """,
        {"test_a_discarded_batch_leaves_no_trace"},
    ),
    "keeps state outside its layout": (
        """
        kept = {}
        plain = ToyNetwork._seen
        def seen(self, batch):
            out = plain(self, batch)
            for s, slot in enumerate(batch.slot.tolist()):
                if int(batch.length[s]) == 0:
                    kept[slot] = int(batch.token[batch.query_start[s]])
                out[batch.query_start[s] : batch.query_start[s + 1]] ^= kept.get(slot, 0)
            return out
        Net._seen = seen
        """,
        {"test_forks_go_their_own_ways", "test_a_cached_prefix_gives_the_logits_of_a_fresh_run"},
    ),
}


@pytest.mark.parametrize("name", BROKEN_NETS)
def test_a_network_is_caught_that(pytester, name):
    net, expected = BROKEN_NETS[name]
    assert arch(pytester, expected, net) == expected


def test_a_network_is_caught_that_is_not_ops_only(pytester):
    expected = {"test_the_recorded_program_replays_bit_for_bit"}
    assert arch(pytester, expected, ops_only="True") == expected


def test_a_describe_is_caught_that_imports_torch(pytester):
    expected = {"test_describing_a_file_imports_no_torch"}
    assert arch(pytester, expected) == expected


def test_an_architecture_is_caught_that_does_not_look_at_its_tensors(pytester):
    net = """
    def describe(header, cache):
        from attrs import evolve
        from luce_core.gguf import FORMATS
        fake = type("Header", (), {"tensor": lambda self, *a: type("I", (), {"num_bytes": 1})})()
        for name in ("uint", "bool", "strings"):
            setattr(fake, name, getattr(header, name))
        return toy.describe(fake, cache)
    """
    expected = {"test_a_missing_tensor_is_named", "test_a_misshapen_tensor_is_named"}
    assert arch(pytester, expected, net) == expected


def test_an_allocation_is_caught_that_is_not_what_the_plan_says(pytester):
    prelude = """
import pytest

@pytest.fixture(autouse=True)
def _another_plan(monkeypatch):
    monkeypatch.setattr("luce_core.testing.arch.state_bytes", lambda *arguments: 1)
"""
    expected = {"test_the_state_takes_the_bytes_the_plan_says"}
    assert arch(pytester, expected, prelude=prelude) == expected


# --- plugins

PLUGIN = """
from luce_core.testing.plugin import PluginContract

class TestBroken(PluginContract):
    hooks = "broken_hooks"
"""

BROKEN_PLUGINS = {
    "imports torch": (
        HOOKS.replace("DESCRIBE", '"luce_core.testing.toy.describe:describe"') + "\nimport torch\n",
        {"test_its_hooks_import_neither_torch_nor_triton"},
    ),
    "imports torch when asked for its devices": (
        """
        from luce_core.contracts import *
        from luce_core.hookspecs import hookimpl
        @hookimpl
        def luce_plugin_info():
            return PluginInfo("broken", API)
        @hookimpl
        def luce_register_devices():
            import torch
            return []
        """,
        {"test_its_hooks_import_neither_torch_nor_triton"},
    ),
    "names a callable that is not there": (
        HOOKS.replace("DESCRIBE", '"luce_core.testing.toy.describe:missing"'),
        {"test_every_callable_it_names_exists"},
    ),
    "misspells a hook": (
        HOOKS.replace("DESCRIBE", '"x:y"').replace("luce_register_archs", "luce_register_arch"),
        {"test_it_loads_beside_the_core_alone"},
    ),
    "has another API": (
        HOOKS.replace("DESCRIBE", '"x:y"').replace("API)", "99)"),
        {"test_it_loads_beside_the_core_alone"},
    ),
    "has options without a description": (
        """
        from pydantic import BaseModel
        from luce_core.contracts import *
        from luce_core.hookspecs import hookimpl
        class Options(BaseModel):
            fast: bool = False
        @hookimpl
        def luce_plugin_info():
            return PluginInfo("broken", API, options=Options)
        """,
        {"test_its_options_say_what_they_are"},
    ),
}


@pytest.mark.parametrize("name", BROKEN_PLUGINS)
def test_a_plugin_is_caught_that(pytester, name):
    hooks, expected = BROKEN_PLUGINS[name]
    net = NET if "broken_net" in hooks else ""
    assert failures(pytester, PLUGIN, expected, broken_hooks=hooks, broken_net=net) == expected


def test_a_static_index_is_caught_that_differs_from_the_hooks(pytester):
    suite = """
    import importlib_metadata, pytest
    from luce_core.testing.plugin import PluginContract

    class Fake:
        entry_points = importlib_metadata.EntryPoints(
            [importlib_metadata.EntryPoint("arch.other", "x", "luce_core.provides")]
        )

    @pytest.fixture(autouse=True)
    def _another_index(monkeypatch):
        monkeypatch.setattr(importlib_metadata, "distribution", lambda name: Fake())

    class TestBroken(PluginContract):
        hooks = "broken_hooks"
        distribution = "luce-broken"
    """
    hooks = HOOKS.replace("DESCRIBE", '"luce_core.testing.toy.describe:describe"')
    found = failures(pytester, suite, broken_hooks=hooks, broken_net=NET)
    assert found == {"test_the_static_index_lists_what_the_hooks_declare"}


# --- drafters

DRAFTER_HOOKS = """
from luce_core.contracts import *
from luce_core.hookspecs import hookimpl

@hookimpl
def luce_plugin_info():
    return PluginInfo("broken", API)

@hookimpl
def luce_register_drafters():
    return [PartSpec("drafter", "broken", "broken_net:make", Equivalence.BITS)]
"""

DRAFTER_NET = """
from luce_core.testing.drafters import ScriptedDrafter

def make(context):
    return Broken(script, name="broken")

def script(tokens, capacity):
    nodes = [(tokens[-1] + step) % 250 for step in range(capacity)]
    return nodes, list(range(-1, capacity - 1))

class Broken(ScriptedDrafter):
    pass
"""

DRAFTER = """
from luce_core.testing.drafter_contract import DrafterContract

class TestBroken(DrafterContract):
    hooks = "broken_hooks"
    name = "broken"
"""


def drafter(pytester, only=(), net=""):
    return failures(pytester, DRAFTER, only, broken_hooks=DRAFTER_HOOKS, broken_net=DRAFTER_NET + dedent(net))


def test_a_clean_drafter_keeps_the_contract(pytester):
    assert drafter(pytester) == set()


BROKEN_DRAFTERS = {
    "proposes more than it was asked for": (
        """
        def propose(self, round):
            from attrs import evolve
            return ScriptedDrafter.propose(self, evolve(round, capacity=round.capacity + 1))
        Broken.propose = propose
        """,
        {"test_every_proposal_is_a_tree_within_its_capacity"},
    ),
    "proposes what is no tree": (
        """
        def script(tokens, capacity):
            return [1], [0]
        """,
        {"test_every_proposal_is_a_tree_within_its_capacity"},
    ),
    "writes to its target's state": (
        """
        def make(context):
            made = Broken(script, name="broken")
            made.pages = context.target.region("tokens")
            return made
        def propose(self, round):
            self.pages.fields["k"].add_(1)
            return ScriptedDrafter.propose(self, round)
        Broken.propose = propose
        """,
        {
            "test_texts_are_those_of_plain_decoding",
            "test_a_slot_taken_again_owes_nothing_to_the_sequence_before",
        },
    ),
}


@pytest.mark.parametrize("name", BROKEN_DRAFTERS)
def test_a_drafter_is_caught_that(pytester, name):
    net, expected = BROKEN_DRAFTERS[name]
    assert drafter(pytester, expected, net) == expected


# --- op layers

OPS_HOOKS = """
from luce_core.contracts import *
from luce_core.hookspecs import hookimpl

@hookimpl
def luce_plugin_info():
    return PluginInfo("broken", API)

@hookimpl
def luce_register_ops():
    pairs = (("toy.fold", "fold"), ("append", "append"), ("moe_linear", "moe_linear"))
    ops = tuple(OpImpl(op, f"broken_net:{fn}", row_invariant=True) for op, fn in pairs)
    return [OpLayer("broken", ops, Equivalence.EQUAL, frozenset({"cpu"}))]
"""

OPS_NET = """
from luce_core.ops import attention
from luce_core.ops.moe import moe_linear
from luce_core.testing.toy.network import fold

def append(ops, b, key, value, region):
    attention.append(ops, b, key, value, region)
"""

OPS = """
from luce_core.testing.op_layer import OpLayerContract
from luce_core.testing.toy import write_toy_model

class TestBroken(OpLayerContract):
    hooks = "broken_hooks"
    layer = "broken"
    arch_hooks = "broken_arch"
    tolerance = 1e-3

    def make_model(self, folder):
        return write_toy_model(folder / "toy.gguf", slots=False)
"""

ARCH_ALONE = """
from luce_core.contracts import *
from luce_core.hookspecs import hookimpl
from luce_core.testing.toy.hooks import luce_register_archs

@hookimpl
def luce_plugin_info():
    return PluginInfo("toy-arch", API)
"""


def op_layer(pytester, net="", equal="BITS"):
    hooks = OPS_HOOKS.replace("EQUAL", equal)
    return failures(
        pytester, OPS, broken_hooks=hooks, broken_net=OPS_NET + dedent(net), broken_arch=ARCH_ALONE
    )


def test_a_clean_op_layer_keeps_the_contract(pytester):
    assert op_layer(pytester) == set()


@pytest.mark.parametrize("equal", ["BITS", "ROUNDING"])
def test_an_op_layer_is_caught_that_computes_something_else(pytester, equal):
    net = """
    def append(ops, b, key, value, region):
        attention.append(ops, b, key + 1, value, region)
    """
    assert op_layer(pytester, net, equal) >= {"test_logits_are_the_references"}


@pytest.mark.parametrize("equal", ["BITS", "ROUNDING"])
def test_an_op_layer_is_caught_in_an_op_its_model_does_not_use(pytester, equal):
    net = """
    from luce_core.ops import moe

    def moe_linear(ops, x, ids, w, count):
        return moe.moe_linear(ops, x, ids.clamp(min=0), w, count)
    """
    assert op_layer(pytester, net, equal) == {"test_every_op_answers_like_the_reference"}


def test_an_op_layer_is_caught_that_is_not_row_invariant_as_it_says(pytester):
    net = """
    def append(ops, b, key, value, region):
        attention.append(ops, b, key + (len(b.slot) > 1), value, region)
    """
    assert op_layer(pytester, net) >= {"test_a_row_invariant_layer_ignores_batch_mates"}


def test_an_op_layer_is_caught_whose_rows_know_the_width_of_their_tree(pytester):
    net = """
    def append(ops, b, key, value, region):
        attention.append(ops, b, key + (b.phase == "held" and len(b.token) > 3), value, region)
    """
    assert op_layer(pytester, net) >= {"test_a_row_invariant_layer_ignores_the_width_of_a_tree"}
