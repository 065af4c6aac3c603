"""What a card can do, by its compute capability: whichever kernel depends on that asks here.

A card may be taken for an older one: `--triton-capability 7.5`, or LUCE_TRITON_CAPABILITY, which tests and
benchmarks need too. Then kernels are chosen, and CUDA C++ is compiled, as for that one; the driver translates
it for the card there is. Imports neither torch nor triton.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from attrs import field, frozen

from luce_backend_triton import devices
from luce_core.contracts import DeviceInfo
from luce_core.errors import UsageError

OLDEST = (6, 1)
"""The first with products of bytes (dp4a)."""
VARIABLE = "LUCE_TRITON_CAPABILITY"
FLAG = "--triton-capability"


@frozen
class Ability:
    """Of one compute capability."""

    capability: tuple[int, int]
    forced: bool = field(default=False, eq=False)

    @property
    def atomics(self) -> bool:
        """Whether Triton's atomic additions compile: they name an order of memory."""
        return self.capability >= (7, 0)

    @property
    def mma(self) -> bool:
        """Whether csrc/mma.cu runs: tensor cores that take 16 × 8 × 8 halves."""
        return self.capability >= (7, 5)

    @property
    def matrix(self) -> bool:
        """Whether Triton's products use tensor cores; else its tiles must be small."""
        return self.capability >= (8, 0)

    @property
    def bf16(self) -> bool:
        """Whether bf16 is multiplied by the hardware."""
        return self.capability >= (8, 0)

    @property
    def overlap(self) -> bool:
        """Whether a launch may begin beside the one before it."""
        return self.capability >= (9, 0)

    @property
    def bulk(self) -> bool:
        """Whether one thread copies whole pieces to shared memory."""
        return self.capability >= (9, 0)

    @property
    def arch(self) -> str:
        """What CUDA C++ is compiled for: the card's own code, or what the driver translates for it."""
        return f"{'compute' if self.forced else 'sm'}_{self.capability[0]}{self.capability[1]}"


EMULATED = Ability((9, 0))
"""Stands for a device in Triton's interpreter."""


def parse(text: str) -> tuple[int, int]:
    """(7, 5) of "7.5". ValueError says what is wanted."""
    if not re.fullmatch(r"\d{1,2}\.\d", text):
        raise ValueError(f"{text!r} is no compute capability; wanted one such as 7.5 or 12.0")
    major, minor = text.split(".")
    return int(major), int(minor)


def words(capability: Sequence[int]) -> str:
    """ "7.5"."""
    return ".".join(map(str, capability))


_told: list[tuple[int, int]] = []
"""By `prepare`, for this process."""


def forced() -> tuple[int, int] | None:
    """What every card is taken for; None: for itself."""
    return _told[-1] if _told else _from_environment()


@cache
def _from_environment() -> tuple[int, int] | None:
    text = os.environ.get(VARIABLE, "")
    try:
        return parse(text) if text else None
    except ValueError as error:
        raise UsageError(f"{VARIABLE}: {error}.") from None


def on(device: Any) -> Ability:
    """Of a `torch.device`; what does not depend on the card is the same on the CPU."""
    return _on(device.type, device.index or 0, forced())


@cache
def _on(kind: str, index: int, instead: tuple[int, int] | None) -> Ability:
    if kind != "cuda":
        return EMULATED if instead is None else Ability(instead, forced=True)
    own = devices.cards()[index].capability
    return Ability(own) if instead in (None, own) else Ability(instead, forced=True)


def of_features(features: frozenset[str]) -> Ability:
    """Of a `DeviceInfo` of this plugin, by its tag "sm_75"."""
    tag = next(tag for tag in features if re.fullmatch(r"sm_\d+", tag)).removeprefix("sm_")
    return Ability((int(tag[:-1]), int(tag[-1])))


def prepare(device: DeviceInfo, options: Any) -> None:
    """Before a layer's ops are used in this process: `OpLayer.prepare`.

    Raises UsageError for a card that is not there, and for kernels that do not run on the one that is.
    """
    if options is not None and options.capability:
        _told[:] = [parse(options.capability)]
    index, instead = int(device.id.partition(":")[2] or 0), forced()
    cards = devices.cards()
    if index >= len(cards):
        raise UsageError(
            f"Device {device.id!r} is not there: {FLAG} made it up to plan for. Drop it to run on what is."
        )
    own = cards[index]
    if instead is not None and instead > own.capability:
        raise UsageError(
            f"{FLAG} {words(instead)} asks for kernels that {own.name!r}, compute capability "
            f"{words(own.capability)}, cannot run. Take an older one, or none."
        )
    _check_torch(own)


def _check_torch(card: devices.Card) -> None:
    """torch's own kernels must be there for the card."""
    import torch

    names = torch.cuda.get_arch_list()
    if not any(runs_on(name, card.capability) for name in names):
        raise UsageError(
            f"This torch ({torch.__version__}) has no kernels for {card.name!r}, compute capability "
            f"{words(card.capability)}; it has {', '.join(names) or 'none for any card'}. Install a build "
            "that has them: builds for CUDA 13 begin with 7.5, those for CUDA 12.6 with 5.0."
        )


def runs_on(name: str, capability: tuple[int, int]) -> bool:
    """Whether code of torch runs: "sm_86" from 8.6 to 8.9, "compute_90", which is translated, from 9.0 on."""
    kind, _, digits = re.sub(r"[a-z]$", "", name).partition("_")
    own = int(digits[:-1]), int(digits[-1])
    return own <= capability and (kind == "compute" or own[0] == capability[0])
