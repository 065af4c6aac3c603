"""Images in a plan: the model of `--mmproj` and the encoder that runs it, held against the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luce_core.contracts import (
    BackendPlan,
    BorrowedEncoder,
    MediaContext,
    MediaProcessor,
    ModelRequest,
    ModelSpec,
    Provenance,
)
from luce_core.errors import ModelFormatError, PluginError
from luce_core.plan_fields import MODELS, Fields
from luce_core.registry import Registry, choices, guarded, resolve

if TYPE_CHECKING:
    from luce_core.gguf import GgufHeader
    from luce_core.plan_models import Described

PROJECTOR = "mmproj"
"""Field of the plan, and name of the model in it."""
MAX_PIXELS = "images.max_pixels"
TOKENS = "tokenizer.ggml.tokens"


def add_projector(
    fields: Fields, target: Described, read: Callable[[Path], GgufHeader], describe: Callable[..., Described]
) -> None:
    """Ask for the model of `--mmproj` and choose the encoder that runs it; without the option nothing.

    Raises ModelFormatError naming the file if it is none, or does not go with the target.
    """
    given = fields.values[PROJECTOR]
    if given is None:
        return
    path = str(given)
    part, spec = _encoder_of(fields, path, read, describe)
    values = fields.values
    model = target.spec(0)
    processor = make_processor(fields.registry, values, part, target=model, encoder=spec, path=path)
    if processor.placeholder not in set(target.header.strings(TOKENS, ())):
        raise ModelFormatError(
            f"Projector file {path!r} does not go with {target.path!r}: that model has no token "
            f"{processor.placeholder!r}, which stands for the rows of an image. Use the projector file that "
            "was made for the model, or go without --mmproj."
        )
    borrowed = _borrowed(model, spec)
    if borrowed is not None:
        fields.problem(borrowed.caution, "Go without --mmproj, if you rely on the answers.", fatal=False)
    origin = fields.origin[PROJECTOR]
    fields.values["parts.encoder"] = (part,)
    fields.origin["parts.encoder"] = Provenance(origin.source, origin.by, f"runs {path!r}")
    request = ModelRequest(PROJECTOR, "encoder", path, f"encoder.{part}")
    fields.values[MODELS] = (*values[MODELS], request)
    fields.values[f"{MODELS}.{PROJECTOR}"] = path
    fields.origin[f"{MODELS}.{PROJECTOR}"] = Provenance("default", "core", f"--mmproj {path}")


def _encoder_of(
    fields: Fields, path: str, read: Callable[[Path], GgufHeader], describe: Callable[..., Described]
) -> tuple[str, ModelSpec]:
    """The encoder part of a projector file, and what the file holds."""
    registry = fields.registry
    header = read(Path(path))
    try:
        found = registry.arch(header.family)
    except PluginError as error:
        raise ModelFormatError(
            f"File {path!r}, given with --mmproj, holds a {header.family!r} model, which nothing here can "
            f"encode images with. {error}"
        ) from error
    part = found.value.encoder
    if not part:
        raise ModelFormatError(
            f"File {path!r}, given with --mmproj, holds a language model ({header.family!r}); wanted a "
            "projector file, whose general.architecture is 'clip'. It is published beside the model, usually "
            "with 'mmproj' in its name."
        )
    return part, describe(fields, header).spec(0)


def make_processor(
    registry: Registry,
    values: Mapping[str, Any],
    part: str,
    *,
    target: ModelSpec,
    encoder: ModelSpec,
    path: str,
) -> MediaProcessor:
    """The server's half of an encoder. Raises ModelFormatError where the two models do not go together."""
    from luce_core.plan_models import plugin_options

    found = registry.part("encoder", part)
    subject = f"Encoder {part!r} of {registry.title(found.plugin)}"
    if not found.value.processor:
        raise PluginError(f"{subject} names no processor, so nothing can make images ready for it.")
    make = resolve(found.value.processor, f"{subject}: its processor")
    options = plugin_options(registry, values, found.plugin)
    token = _placeholder(target, encoder, path)
    context = MediaContext(part, options, target, encoder, path, int(values[MAX_PIXELS]), token)
    processor: MediaProcessor = guarded(
        f"{subject}: its processor {found.value.processor!r}", lambda: make(context)
    )
    return processor


def _borrowed(target: ModelSpec, encoder: ModelSpec) -> BorrowedEncoder | None:
    """How the target takes the rows of an encoder that was not made for it; None where it was."""
    found = target.borrows
    return found if found is not None and encoder.arch in found.families else None


def _placeholder(target: ModelSpec, encoder: ModelSpec, path: str) -> str:
    borrowed = _borrowed(target, encoder)
    if borrowed is None or borrowed.placeholder:
        return borrowed.placeholder if borrowed else ""
    raise ModelFormatError(
        f"Projector file {path!r} cannot be used with the model of architecture {target.arch!r}: its "
        f"vocabulary has no token that could stand for the rows of an image; wanted one of "
        f"{choices(map(repr, borrowed.wanted))}. Use a file that has one, or go without --mmproj."
    )


def media_processor(plan: BackendPlan, registry: Registry) -> MediaProcessor | None:
    """What makes images ready for the plan's encoder; None without one."""
    for model in plan.models:
        if model.role == "encoder":
            part = model.part.partition(".")[2]
            return make_processor(
                registry, plan.values, part, target=plan.models[0].spec, encoder=model.spec, path=model.path
            )
    return None
