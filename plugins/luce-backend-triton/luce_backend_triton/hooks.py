"""What the plugin declares. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from luce_backend_triton import capability, devices, memory, nvrtc
from luce_backend_triton.capability import FLAG, OLDEST, words
from luce_backend_triton.devices import Card
from luce_backend_triton.options import TritonOptions
from luce_core.contracts import (
    API,
    BackendPlan,
    DeviceInfo,
    Equivalence,
    OpImpl,
    OpLayer,
    PartSpec,
    PlanPatch,
    PluginInfo,
    Problem,
)
from luce_core.hookspecs import hookimpl

OP_LAYERS, EXECUTOR = "execution.op_layers", "parts.executor"
GRAPHS = "cuda-graphs"
OPS = (
    "pack_linear", "pack_group", "linear", "table_rows", "norm_linear", "linear_out", "gated_mlp", "head",
)  # fmt: skip
OWN, FOLLOWED = "triton.", ("linear_out", "gated_mlp")
"""Ops for rewritten programs, which say what norm follows."""
SHARED_OPS = {
    "commit_pages": "state", "commit_slot": "state", "commit_slots": "state", "sample": "picks",
    "process_logits": "picks", "newest_tokens": "picks", "note_picks": "picks",
}  # fmt: skip
"""Op -> the module of its function: the same for every layer."""
KERNELS = {"triton": "CUDA", "triton-portable": "PORTABLE"}
"""Op layer -> which of a module's."""
INVARIANT = {"triton-invariant": "CUDA", "triton-invariant-portable": "PORTABLE"}
"""Likewise; their modules are those of `invariant`."""
SELF_CHECKS = ("products", "sequences", "experts")
"""Of each, the parts of its self-check."""
COMPILED = (next(iter(KERNELS)), next(iter(INVARIANT)))
DETERMINISTIC = (
    "--deterministic: a row's bits do not depend on its batch; latents, compressed entries, streams and "
    "linear attention without the delta rule go to the f32 reference, where the width of a tree counts"
)
TOO_OLD_RANK = -100
"""Of a card whose kernels there are none for: behind every other device."""
LARGE_BYTES, LARGE_CHUNK = 38 << 30, 2048
"""From so much memory on, rows of a step."""


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="triton", api=API, options=TritonOptions)


@hookimpl
def luce_register_devices(options: TritonOptions | None) -> list[DeviceInfo]:
    measured, products = devices.read_measured(), devices.read_measured("products")
    found = []
    for card in _cards(options.capability if options else ""):
        bytes_s, provenance = devices.bandwidth(card, measured)
        usable = card.capability >= OLDEST
        tags = {"cuda", "gpu", "sm_{}{}".format(*card.capability), *(["triton"] if usable else [])}
        found.append(
            DeviceInfo(
                id=f"cuda:{card.index}",
                name=f"{card.name}, compute capability {words(card.capability)}",
                memory_bytes=card.memory_bytes,
                bandwidth_bytes_s=bytes_s,
                features=frozenset(tags),
                rank=100 if usable else TOO_OLD_RANK,
                provenance=provenance,
                flops_s=products.get(card.key, 0.0),
                flops_provenance="measured here: torch multiplying halves" if card.key in products else "",
                driver_bytes=memory.DRIVER_BYTES,
            )
        )
    return found


def _cards(asked: str) -> tuple[Card, ...]:
    """Those there are, as what they are taken for; without any, one that is only planned for."""
    instead, found = capability.parse(asked) if asked else capability.forced(), devices.cards()
    if instead is None:
        return found
    taken = f"taken for an older one by {FLAG}"
    changed = [
        card if card.capability == instead else evolve(card, name=f"{card.name}, {taken}", capability=instead)
        for card in found
    ]
    return tuple(changed) or (
        Card(0, f"no card, one to plan for ({FLAG})", devices.PLANNED_BYTES, 0, instead, 0.0),
    )


@hookimpl
def luce_register_ops() -> list[OpLayer]:
    summaries = {
        "triton": "weights in the file's precision; few rows in CUDA C++, many through f16 products",
        "triton-portable": "the same without CUDA C++: Triton alone",
        "triton-invariant": "weights in the file's precision; a row's bits depend on nothing but the row",
        "triton-invariant-portable": "the same without CUDA C++: Triton alone",
    }
    return [
        OpLayer(
            name,
            _impls(ops, invariant=name in INVARIANT),
            Equivalence.ROUNDING,
            frozenset({"triton"}),
            summaries[name],
            kept="luce_backend_triton.memory:kept",
            activations="luce_backend_triton.memory:activations",
            scratch_bytes=memory.SCRATCH_BYTES,
            self_checks=tuple(f"{_package(name in INVARIANT)}.selfcheck:{ops}.{one}" for one in SELF_CHECKS),
            prepare="luce_backend_triton.capability:prepare",
        )
        for name, ops in (KERNELS | INVARIANT).items()
    ]


def _needs(op: str) -> frozenset[str]:
    """Packed weights are made for the ops that read them, and read by no others; an op for rewritten programs
    goes with the one it stands for.
    """
    if op == "pack_linear":
        return frozenset({"linear", "table_rows"})
    named = op.removeprefix(OWN)
    return frozenset({"pack_linear", named} - {op}) if named in OPS else frozenset()


def _package(invariant: bool) -> str:
    return "luce_backend_triton.invariant" if invariant else "luce_backend_triton"


def _impls(ops: str, invariant: bool) -> tuple[OpImpl, ...]:
    """ops: CUDA or PORTABLE."""
    package = _package(invariant)
    places = {op: f"{package}.ops:{ops}.{op}" for op in OPS}
    if invariant:
        places |= {op: f"{package}.ops:{ops}.{op}" for op in ("rms", "head_rms")}
    places["attention"] = f"{package}.attention:attention"
    places["delta"] = f"{package}.delta:delta" if invariant else f"{package}.delta:{ops}.delta"
    route, experts = ("mixtures", "mixtures") if invariant else ("route", "moe")
    places |= {"route": f"{package}.{route}:route", "experts": f"{package}.{experts}:{ops}.experts"}
    places |= {op: f"luce_backend_triton.{where}:{op}" for op, where in SHARED_OPS.items()}
    if not invariant and ops == "CUDA":
        places |= {f"{OWN}{op}": places[op] for op in FOLLOWED} | {"*": "luce_backend_triton.normed:rewrite"}
    return tuple(OpImpl(op, place, row_invariant=invariant, needs=_needs(op)) for op, place in places.items())


@hookimpl
def luce_register_parts() -> list[PartSpec]:
    return [
        PartSpec(
            kind="executor",
            name=GRAPHS,
            factory="luce_backend_triton.executor:make_executor",
            equivalence=Equivalence.ROUNDING,  # tables grow by doubling, and attention's sums are cut by them
            summary="a step that was seen before is one replayed CUDA graph",
            device_bytes=memory.CAPTURED * memory.GRAPH_BYTES,
        )
    ]


@hookimpl
def luce_extend_plan(plan: BackendPlan) -> Sequence[PlanPatch]:
    if not _is_ours(plan) or _too_old(plan):
        return []
    asked, exact = plan.values["triton.kernels"], bool(plan.values["deterministic"])
    ability = capability.of_features(_device(plan).features)
    graphs = PlanPatch(EXECUTOR, (GRAPHS,), "the host's calls would take longer than the card's work")
    patches = [graphs, *_chunk(plan)]
    cuda, portable = tuple(INVARIANT if exact else KERNELS)
    promise = f"; {DETERMINISTIC}" if exact else ""
    if asked == "triton":
        return [PlanPatch(OP_LAYERS, (portable,), f"--triton-kernels triton{promise}"), *patches]
    version = nvrtc.compiler_version(ability.arch)
    if asked == "auto" and not version:
        why = f"no NVRTC for {ability.arch}; few rows are slower in Triton{promise}"
        return [PlanPatch(OP_LAYERS, (portable,), why), *patches]
    why = "; ".join((f"CUDA C++ by NVRTC {version}", *_lacks(ability)))
    return [PlanPatch(OP_LAYERS, (cuda,), f"{why}{promise}"), *patches]


def _lacks(ability: capability.Ability) -> list[str]:
    """What an older card does otherwise, in words."""
    found = []
    if not ability.mma:
        found.append("no tensor cores here that fit, so up to 32 rows are integer products too")
    if not ability.matrix:
        found.append("attention and DeltaNet without tensor cores, BF16 weights as f16 or f32")
    if found:
        found[0] = f"compute capability {words(ability.capability)}: {found[0]}"
    return found


def _chunk(plan: BackendPlan) -> Sequence[PlanPatch]:
    """Longer chunks of a prompt where their activations are a small part of the memory."""
    if _device(plan).memory_bytes < LARGE_BYTES:
        return []
    why = f"short chunks leave a card of {LARGE_BYTES >> 30} GiB and more waiting for the host"
    return [PlanPatch("engine.row_budget", LARGE_CHUNK, why)]


@hookimpl
def luce_check_plan(plan: BackendPlan) -> Sequence[Problem]:
    if not _is_ours(plan):
        return []
    device = _device(plan)
    if _too_old(plan):
        why = f"its kernels need {words(OLDEST)} (products of bytes) or newer"
        return [Problem(f"Device {device.id!r} is {device.name}; {why}.", "Choose another: --device cpu.")]
    ability, problems = capability.of_features(device.features), []
    compiled = [name for name in COMPILED if name in plan.values[OP_LAYERS]]
    if compiled and not nvrtc.compiler_version(ability.arch):
        problems.append(
            Problem(
                f"Op layer {compiled[0]!r} compiles CUDA C++, but there is no NVRTC beside torch or in a "
                f"toolkit that knows {ability.arch}.",
                f"Install {nvrtc.package(ability.arch)}, set CUDA_HOME, or choose --triton-kernels triton.",
            )
        )
    return [*problems, *_ranges(plan, ability)]


def _ranges(plan: BackendPlan, ability: capability.Ability) -> list[Problem]:
    """A cache in bf16 where the hardware has none: whoever wants its range gets it, and is told the price."""
    wide = [name for name in ("cache.k_type", "cache.v_type") if plan.values[name] == "bf16"]
    if ability.bf16 or not wide:
        return []
    asked = " and ".join(dict.fromkeys(plan.origin[name].by for name in wide))
    message = (
        f"{asked} wants the cache in bf16, for its range; compute capability {words(ability.capability)} has "
        "no arithmetic of that type, so attention converts every number it reads."
    )
    return [Problem(message, "Numbers up to 65504 fit f16, which is faster here.", fatal=False)]


def _device(plan: BackendPlan) -> DeviceInfo:
    return next(item for item in plan.devices if item.id == plan.models[0].layer_device[0])


def _too_old(plan: BackendPlan) -> bool:
    return "triton" not in _device(plan).features


def _is_ours(plan: BackendPlan) -> bool:
    return {device.partition(":")[0] for device in plan.models[0].layer_device} == {"cuda"}
