"""The contract of published sizes: what an architecture declares in `ArchSpec.geometries`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from attrs import Factory, frozen

from luce_core import synth
from luce_core.contracts import CacheOptions, Geometry
from luce_core.errors import PlanError
from luce_core.model.batch import RowSet, make_batch
from luce_core.plan_memory import MIN_CONTEXT_TOKENS
from luce_core.testing.command import run_command
from luce_core.testing.contract import Contract
from luce_core.testing.pipeline import TOY_HOOKS, make_pipeline
from luce_core.testing.plugin import registry_of
from luce_core.testing.rig import ModelRig, describe
from luce_core.testing.server import serving

MAX_RESIDUAL = 6e4
"""Where float16 ends, nearly."""
PATIENCE_S = 120.0
LOGIT_SPREAD = (0.05, 50.0)
"""Their deviation: neither all the same nor all decided."""


@frozen
class Published:
    """What is known of a model from elsewhere; f16 cache."""

    parameters: int
    num_bytes: int
    """Of all tensors in Q4_K_M."""
    token_bytes: int
    """State of a token of context, in groups without a window."""
    sequence_bytes: int = 0
    """State that does not grow."""
    window_bytes: Mapping[int, int] = Factory(dict)
    """Window -> state of each of the newest tokens."""


class GeometryContract(Contract):
    """Headers of every published size are described as they are; random weights give a sane forward."""

    hooks: str
    """The plugin's module of hooks."""
    published: Mapping[str, Published]
    """By geometry: what `luce-core inspect` must say."""
    quants: tuple[str, ...] = ("q4_k_m",)
    """Of the small models that are run."""

    def small(self) -> Sequence[Geometry]:
        """Small ones of each architecture: few columns, at least 300 tokens, as many layers as real ones."""
        raise NotImplementedError("a subclass of GeometryContract makes small geometries here")

    def test_every_header_is_described(self, tmp_path: Path) -> None:
        """Without weights: parameters, bytes, and a forward's share of them, in every quantization."""
        registry = registry_of(self.hooks)
        found = synth.geometries(registry)
        assert found, "no geometries are declared"
        for item in found:
            geometry = item.value
            for quant in synth.quants_of(geometry):
                (path,) = synth.write(
                    geometry,
                    quant,
                    tmp_path / "h.gguf",
                    header_only=True,
                    tokenizer=False,
                    overwrite=True,
                )
                spec = describe(registry, path, CacheOptions(0))
                subject = f"{geometry.name} in {quant}"
                stored = spec.stored.values()
                parameters = spec.parameters + sum(size.parameters for size in stored)
                weight_bytes = spec.weight_bytes + sum(size.num_bytes for size in stored)
                assert parameters == geometry.parameters, subject
                assert spec.vocab == geometry.vocab, subject
                assert weight_bytes == synth.num_bytes(geometry, quant), subject
                assert 0 < spec.active_bytes <= spec.weight_bytes, subject

    def test_names_and_aliases_are_of_one_geometry(self) -> None:
        synth.by_name(registry_of(self.hooks))

    def test_inspect_says_what_was_published(self, tmp_path: Path) -> None:
        for name, wanted in self.published.items():
            path = self._header(name, tmp_path)
            found = json.loads(run_command("inspect", path, "--json", hooks=(self.hooks,)))["model"]
            assert found["parameters"] == wanted.parameters, name
            assert found["weight_bytes"] == wanted.num_bytes, name
            assert found["state"] == {
                "cache_type": "f16",
                "token_bytes": wanted.token_bytes,
                "window_bytes": {str(window): size for window, size in wanted.window_bytes.items()},
                "sequence_bytes": wanted.sequence_bytes,
            }, name

    def test_what_fits_fits_and_a_block_more_does_not(self, tmp_path: Path) -> None:
        """`luce-core plan --fits` against plans that are asked for each of its contexts."""
        for name in self.published:
            path = self._header(name, tmp_path)
            planned = partial(run_command, "plan", path, "--json", hooks=(self.hooks,), rig=True)
            for room in json.loads(planned("--fits")):
                kept = ("--cache-type-k", "f16")  # chosen: no smaller type is taken in its place
                alone = partial(planned, "--memory", room["memory_bytes"], "--max-sequences", 1, *kept, "-c")
                subject = f"{name} in {room['memory_bytes'] >> 30} GiB"
                if room["context"]:
                    plan = json.loads(alone(room["context"]))
                    used = [row for row in plan["memory"] if row["device"] == "cpu"]
                    assert sum(row["bytes"] for row in used) <= room["limit_bytes"], subject
                    block = plan["fields"]["cache.block_tokens"]["value"]
                    if not room["trained"]:
                        with pytest.raises(PlanError, match="is short of"):
                            alone(room["context"] + block)
                else:
                    assert room["short_bytes"] > 0, subject
                    with pytest.raises(PlanError, match="is short of"):
                        alone(MIN_CONTEXT_TOKENS)

    def _header(self, name: str, folder: Path) -> Path:
        geometry = synth.find(registry_of(self.hooks), name)
        (path,) = synth.write(
            geometry, "q4_k_m", folder / f"{name}.gguf", header_only=True, tokenizer=False, overwrite=True
        )
        return path

    def test_random_weights_give_a_sane_forward(self, tmp_path: Path) -> None:
        """No activation leaves float16 at any depth, no logit is NaN, and they tell tokens apart."""
        for geometry in self.small():
            for quant in self.quants:
                (path,) = synth.write(geometry, quant, tmp_path / "w.gguf", seed=5, overwrite=True)
                rig = ModelRig(path, self.hooks, num_slots=2, num_blocks=8, block_tokens=128)
                subject = f"{geometry.name} in {quant}"
                final, logits = _run(rig, 40)
                assert bool(torch.isfinite(final).all()), f"{subject}: not finite"
                assert float(final.abs().max()) < MAX_RESIDUAL, f"{subject}: beyond float16"
                assert bool(torch.isfinite(logits).all()), f"{subject}: logits are not finite"
                low, high = LOGIT_SPREAD
                assert low < float(logits.std()) < high, f"{subject}: logits deviate by {logits.std():.3g}"

    def test_a_small_model_answers_over_http(self, tmp_path: Path) -> None:
        """Through the plan, the engine and a real server: a chat, whole and streamed, says the same."""
        for geometry in self.small():
            (path,) = synth.write(geometry, self.quants[0], tmp_path / "w.gguf", seed=5, overwrite=True)
            pipeline = make_pipeline(
                path, TOY_HOOKS, self.hooks, options={"ctx_size": 512, "max_sequences": 2}
            )
            body = {
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 6,
                "temperature": 0,
                "ignore_eos": True,
            }
            with serving(pipeline, model=geometry.name) as served:
                url = f"{served.url}/v1/chat/completions"
                answer = json.loads(_post(url, body))
                streamed = _post(url, {**body, "stream": True})
            assert answer["usage"]["completion_tokens"] == 6, geometry.name
            lines = [line[6:] for line in streamed.splitlines() if line.startswith("data: ")]
            assert lines.pop() == "[DONE]", geometry.name
            choices = [choice for line in lines for choice in json.loads(line)["choices"]]
            reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
            assert reasons == [answer["choices"][0]["finish_reason"]], geometry.name
            for field in ("content", "reasoning_content"):
                said = answer["choices"][0]["message"].get(field) or ""
                pieces = [choice["delta"].get(field) or "" for choice in choices]
                assert "".join(pieces) == said, f"{geometry.name}: {field}"


def _post(url: str, body: Mapping[str, Any]) -> str:
    """The answer. Raises HTTPError when it is none."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
        return text


def _run(rig: ModelRig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(what goes into the head, logits) of every row of a text."""
    tokens = [(7 * place) % rig.spec.vocab for place in range(length)]
    seq = rig.open()
    assert rig.blocks.reserve(seq, length)
    tables = {key.partition("/")[2]: table for key, table in rig.blocks.tables(seq).items()}
    rows = RowSet(
        slot=rig.blocks.slot(seq),
        length=0,
        tokens=tokens,
        tables=tables,
        wanted=range(length),
    )
    batch = make_batch("prefill", [rows], axes=rig.spec.position_axes, device=rig.device)
    final = rig.backend.forward(batch).final
    return final, rig.backend.head(final)
