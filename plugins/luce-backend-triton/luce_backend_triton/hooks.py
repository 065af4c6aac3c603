"""What the plugin declares. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Sequence

from luce_backend_triton import devices, memory, nvrtc
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
SEQUENCE_OPS = {
    "attention": "attention", "delta": "delta", "commit_pages": "state", "commit_slot": "state",
    "commit_slots": "state", "route": "route",
}  # fmt: skip
"""Op -> the module of its function: the same for every layer."""
LAYERS = {"triton": "CUDA", "triton-portable": "PORTABLE"}
LARGE_BYTES, LARGE_CHUNK = 38 << 30, 2048
"""From so much memory on, rows of a step."""


@hookimpl
def luce_plugin_info() -> PluginInfo:
    return PluginInfo(name="triton", api=API, options=TritonOptions)


@hookimpl
def luce_register_devices() -> list[DeviceInfo]:
    measured, products = devices.read_measured(), devices.read_measured("products")
    found = []
    for card in devices.cards():
        bytes_s, provenance = devices.bandwidth(card, measured)
        major, minor = card.capability
        found.append(
            DeviceInfo(
                id=f"cuda:{card.index}",
                name=f"{card.name}, compute capability {major}.{minor}",
                memory_bytes=card.memory_bytes,
                bandwidth_bytes_s=bytes_s,
                features=devices.features(card),
                rank=100,
                provenance=provenance,
                flops_s=products.get(card.key, 0.0),
                flops_provenance="measured here: torch multiplying halves" if card.key in products else "",
            )
        )
    return found


@hookimpl
def luce_register_ops() -> list[OpLayer]:
    summaries = {
        "triton": "weights in the file's precision; few rows in CUDA C++, many through f16 products",
        "triton-portable": "the same without CUDA C++: Triton alone",
    }
    return [
        OpLayer(
            name,
            (
                *(OpImpl(op, f"luce_backend_triton.ops:{ops}.{op}") for op in OPS),
                *(OpImpl(op, f"luce_backend_triton.{where}:{op}") for op, where in SEQUENCE_OPS.items()),
                OpImpl("experts", f"luce_backend_triton.moe:{ops}.experts"),
            ),
            Equivalence.ROUNDING,
            frozenset({"triton"}),
            summaries[name],
            weight_share=memory.WEIGHT_SHARE,
            scratch_bytes=memory.SCRATCH_BYTES,
            self_check=f"luce_backend_triton.selfcheck:check_{ops.lower()}",
        )
        for name, ops in LAYERS.items()
    ]


@hookimpl
def luce_register_parts() -> list[PartSpec]:
    return [
        PartSpec(
            kind="executor",
            name=GRAPHS,
            factory="luce_backend_triton.executor:make_executor",
            equivalence=Equivalence.ROUNDING,  # tables grow by doubling, and attention's sums are cut by them
            summary="a step that was seen before is one replayed CUDA graph",
            device_bytes=memory.GRAPH_BYTES,
        )
    ]


@hookimpl
def luce_extend_plan(plan: BackendPlan) -> Sequence[PlanPatch]:
    if not _is_ours(plan):
        return []
    if plan.values["deterministic"]:
        why = "a row's bits depend on how many others there are, so --deterministic takes the f32 reference"
        return [PlanPatch(OP_LAYERS, (), why)]
    asked = plan.values["triton.kernels"]
    graphs = PlanPatch(EXECUTOR, (GRAPHS,), "the host's calls would take longer than the card's work")
    patches = [graphs, *_chunk(plan)]
    if asked == "triton":
        return [PlanPatch(OP_LAYERS, ("triton-portable",), "--triton-kernels triton"), *patches]
    version = nvrtc.compiler_version()
    if asked == "auto" and not version:
        why = "no NVRTC; few rows are slower in Triton"
        return [PlanPatch(OP_LAYERS, ("triton-portable",), why), *patches]
    return [PlanPatch(OP_LAYERS, ("triton",), f"CUDA C++ by NVRTC {version}"), *patches]


def _chunk(plan: BackendPlan) -> Sequence[PlanPatch]:
    """Longer chunks of a prompt where their activations are a small part of the memory."""
    device = next(item for item in plan.devices if item.id == plan.models[0].layer_device[0])
    if device.memory_bytes < LARGE_BYTES:
        return []
    why = f"short chunks leave a card of {LARGE_BYTES >> 30} GiB and more waiting for the host"
    return [PlanPatch("engine.row_budget", LARGE_CHUNK, why)]


@hookimpl
def luce_check_plan(plan: BackendPlan) -> Sequence[Problem]:
    if not _is_ours(plan):
        return []
    problems = []
    if "triton" in plan.values[OP_LAYERS] and not nvrtc.compiler_version():
        problems.append(
            Problem(
                "Op layer 'triton' compiles CUDA C++, but there is no NVRTC beside torch or in a toolkit.",
                "Install nvidia-cuda-nvrtc, set CUDA_HOME, or choose --triton-kernels triton.",
            )
        )
    return problems


def _is_ours(plan: BackendPlan) -> bool:
    return {device.partition(":")[0] for device in plan.models[0].layer_device} == {"cuda"}
