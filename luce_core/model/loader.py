"""Loads a model: maps its file, packs its weights, allocates its state, builds and binds its network."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from attrs import evolve
from torch import Tensor

from luce_core.contracts import ModelPlan, ModelSpec, Network, Ops, Program, StateSizes, Weights
from luce_core.errors import EngineError, ModelFormatError, PluginError, UsageError
from luce_core.gguf import FORMATS, FormatRegistry, GgufFile, GgufHeader
from luce_core.model.backend import Built, NetworkBackend, NextnPrograms, Recorded
from luce_core.model.state import ModelState
from luce_core.model.weights import FileWeights, Progress
from luce_core.ops import Layer, OpsNamespace, Recorder, build_ops, compile_program, rewrite
from luce_core.ops.pack import dequantizer

log = logging.getLogger("luce_core.model")

Build = Callable[[ModelSpec, Weights, Ops], Network]
Rewrite = Callable[[Program, OpsNamespace], Program]
TOKENIZER = "tokenizer.ggml.model"
REWRITE = "*"
"""The entry of an op layer that rewrites recorded programs."""


class Loader:
    """`ModelLoader`. Knows no plugin: architectures and op layers are looked up through what it is given."""

    def __init__(
        self,
        build_of: Callable[[str], Build],
        layer_of: Callable[[str], Layer],
        sizes: StateSizes,
        *,
        tokenizer_of: Callable[[GgufHeader], Any] | None = None,
        progress: Progress | None = None,
        formats: FormatRegistry = FORMATS,
    ) -> None:
        """build_of: architecture -> its `build`. layer_of: name of an op layer -> op -> implementation."""
        self._build_of = build_of
        self._layer_of = layer_of
        self._sizes = sizes
        self._tokenizer_of = tokenizer_of
        self._progress = progress
        self._formats = formats

    def load(self, plan: ModelPlan, layer: Mapping[str, Callable[..., Any]] | None = None) -> Model:
        """Map the file, pack the weights, allocate the state; `layer` lies on top of the plan's op layers."""
        device = _only_device(plan)
        layers = [dict(self._layer_of(name)) for name in plan.op_layers]
        if layer:
            layers.append(dict(layer))
        rewrites = tuple(found for found in (one.pop(REWRITE, None) for one in layers) if found is not None)
        ops = build_ops({"dequantize": dequantizer(self._formats)}, *layers)
        with GgufFile.open(plan.path, self._formats) as file:
            spec = plan.spec if plan.spec.identity else evolve(plan.spec, identity=file.identity())
            tokenizer = self._tokenizer(plan, file.header)
            state = ModelState(plan.name, spec.layout, self._sizes, device)
            model = Model(
                plan=plan,
                backend=NetworkBackend(spec, ops, state),
                tokenizer=tokenizer,
                build=self._build_of(spec.arch),
                rewrites=rewrites,
                progress=self._progress,
                formats=self._formats,
            )
            model.attach(file)
        return model

    def _tokenizer(self, plan: ModelPlan, header: GgufHeader) -> Any:
        """None for a drafter, scorer or encoder whose file has none: it runs on the target's token ids."""
        if self._tokenizer_of is None or (plan.role != "target" and TOKENIZER not in header.metadata):
            return None
        return self._tokenizer_of(header)


class Model:
    """`LoadedModel`. Engine or start-up thread, never both at once."""

    def __init__(
        self,
        plan: ModelPlan,
        backend: NetworkBackend,
        tokenizer: Any,
        build: Build,
        rewrites: tuple[Rewrite, ...],
        progress: Progress | None,
        formats: FormatRegistry,
    ) -> None:
        self.plan = plan
        self.backend = backend
        self.target = backend
        self.tokenizer = tokenizer
        self.generation = 0
        self._progress = progress
        self._formats = formats
        self._build = build
        self._rewrites = rewrites
        self._identity = ""

    @property
    def network(self) -> Any:
        """What its architecture built."""
        return self.backend.network

    @property
    def ops(self) -> OpsNamespace:
        """The namespace its network runs with."""
        return self.backend.ops

    @property
    def state(self) -> ModelState:
        """Regions and slots of this model."""
        return self.backend.state

    def attach(self, file: GgufFile) -> None:
        """Pack the weights of the open file and bind the network to them."""
        self._identity = file.identity()
        spec, ops = self.backend.spec, self.backend.ops
        weights = FileWeights(file, ops, self.state, self.state.device, self._progress)
        network = self._build(spec, weights, cast("Ops", ops))

        if self.plan.role == "encoder":  # its part calls it by methods of its own, which nothing records
            self.backend.attach(Built(network, _no_rows, _no_rows, _no_rows))
            return

        def record() -> Recorded:
            recorder = Recorder(ops)
            return record_network(self._build(spec, weights, cast("Ops", recorder)), recorder)

        recorded = None
        if self._rewrites:
            try:
                recorded = record()
            except PluginError as error:
                log.warning(
                    "The network runs call by call, without what op layers make of programs. %s", error
                )
        if recorded is None:
            self.backend.attach(Built(network, network.trunk, network.logits, record, network.nextn))
            return
        trunk = self._compiled(recorded.trunk, network.trunk)
        logits = self._compiled(recorded.logits, network.logits)
        chain = [
            ProgramNetwork(self._compiled(one.trunk), self._compiled(one.logits)) for one in recorded.nextn
        ]
        for made, one in zip(chain, recorded.nextn, strict=True):
            made.nextn = None if one.following is None else chain[one.following]
        self.backend.attach(Built(network, trunk, logits, record, chain[0] if chain else None))

    def _compiled(
        self, program: Program, direct: Callable[..., Tensor] | None = None
    ) -> Callable[..., Tensor]:
        """direct: what it was recorded from, which it is where no layer changes it."""
        ops = self.backend.ops
        changed = rewrite(program, self._rewrites, ops)
        return direct if direct is not None and changed is program else compile_program(changed, ops)

    def park(self) -> None:
        """Give the device memory back. The state's content is kept; on the CPU it stays where it is."""
        self.backend.detach()
        self.state.park()

    def unpark(self) -> None:
        """Pack the weights again, from the same file. Raises ModelFormatError if it has changed."""
        self.state.unpark()
        with GgufFile.open(self.plan.path, self._formats) as file:
            if file.identity() != self._identity:
                raise ModelFormatError(
                    f"Model file '{self.plan.path}' has changed since it was loaded. Restart to serve the "
                    "new one."
                )
            self.attach(file)
        self.generation += 1


class ProgramNetwork:
    """An MTP block as compiled programs."""

    nextn: Network | None = None

    def __init__(self, trunk: Callable[..., Tensor], logits: Callable[[Tensor], Tensor]) -> None:
        self.trunk = trunk
        self.logits = logits


def record_network(network: Network, recorder: Recorder) -> Recorded:
    """The programs of a network that was built over `recorder`, its chain of MTP blocks included."""
    chain: list[Network] = []
    following = network.nextn
    while following is not None and all(following is not known for known in chain):
        chain.append(following)
        following = following.nextn

    def place(one: Network | None) -> int | None:
        return next((place for place, known in enumerate(chain) if known is one), None)

    nextn = [
        NextnPrograms(
            recorder.record(one.trunk, ("batch", "final")),
            recorder.record(one.logits, ("final",)),
            place(one.nextn),
        )
        for one in chain
    ]
    trunk, logits = recorder.record(network.trunk), recorder.record(network.logits, ("final",))
    return Recorded(trunk, logits, tuple(nextn))


def _no_rows(*_: Any) -> Any:
    raise EngineError("An encoder takes no rows of tokens; its part runs it.")


def _only_device(plan: ModelPlan) -> str:
    devices = sorted(set(plan.layer_device))
    if len(devices) != 1 or plan.shards != 1:
        where = ", ".join(map(repr, devices)) or "no device"
        raise UsageError(
            f"Model {plan.name!r} is planned on {where} in {plan.shards} shards; a model runs whole on one "
            "device. Choose one with --device."
        )
    return devices[0]
