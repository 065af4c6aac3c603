"""What architecture plugins need at build time: rotary frequencies, norms without weight."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from luce_core.contracts import Norm, RopeSpec
from luce_core.errors import ModelFormatError
from luce_core.model.metadata import RopeParams


def rope_spec(
    params: RopeParams,
    *,
    pairs: Literal["halves", "adjacent"],
    factors: Tensor | None = None,
    device: str | torch.device = "cpu",
    part: Literal["first", "last"] = "first",
    sections: tuple[int, ...] = (),
    interleaved_sections: bool = False,
    magnitude: float | None = None,
) -> RopeSpec:
    """Frequencies theta^(-2j / n_rot), scaled as `params` says.

    factors: f32[n_rot / 2] of tensor `rope_freqs.weight` (llama3, Gemma 4) or of the one `long_factors`
    names; each divides its frequency. magnitude: in place of what `params` says.
    """
    exponent = torch.arange(0, params.num_rotated, 2, dtype=torch.float32) / params.num_rotated
    inv_freq = 1.0 / (params.theta**exponent)
    if factors is not None:
        if factors.shape != inv_freq.shape:
            raise ModelFormatError(
                f"Tensor 'rope_freqs.weight' has the shape {list(factors.shape)}; wanted "
                f"{list(inv_freq.shape)}, one factor per rotated pair. Convert the model again."
            )
        inv_freq = inv_freq / factors.to("cpu", torch.float32)
    found = 1.0
    if params.scaling == "linear":
        inv_freq = inv_freq / params.factor
    elif params.scaling == "yarn":
        inv_freq = _yarn(inv_freq, params)
        if params.ext_factor != 0.0:
            found = params.attention_factor * (1.0 + 0.1 * math.log(params.factor))
    elif params.scaling == "longrope":
        found = params.attention_factor
    return RopeSpec(
        inv_freq=inv_freq.to(device),
        pairs=pairs,
        magnitude=found if magnitude is None else magnitude,
        sections=sections,
        interleaved_sections=interleaved_sections,
        part=part,
    )


def unit_norm(width: int, eps: float, device: str | torch.device = "cpu") -> Norm:
    """A norm without weight: a weight of ones, which changes no bit."""
    return Norm(torch.ones(width, device=device), eps)


def _yarn(inv_freq: Tensor, params: RopeParams) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): keep pairs that turn often within the trained context, stretch
    those that turn rarely, a ramp between. beta_fast, beta_slow: turns at its two ends.
    """
    low = max(math.floor(_pair_that_turns(params.beta_fast, params)), 0)
    high = min(math.ceil(_pair_that_turns(params.beta_slow, params)), params.num_rotated - 1)
    pair = torch.arange(inv_freq.shape[0], dtype=torch.float32)
    kept = (1.0 - ((pair - low) / max(high - low, 0.001)).clamp(0.0, 1.0)) * params.ext_factor
    return inv_freq / params.factor * (1.0 - kept) + inv_freq * kept


def _pair_that_turns(turns: float, params: RopeParams) -> float:
    """The (fractional) pair that makes so many turns within the trained context."""
    wavelengths = math.log(params.original_context / (turns * 2.0 * math.pi))
    return params.num_rotated * wavelengths / (2.0 * math.log(params.theta))
