"""The groups of all models of one engine, as the block manager sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm

from attrs import frozen

from luce_core.contracts import Problem, StateLayout, StateStore
from luce_core.errors import PlanError


@frozen
class GroupInfo:
    """One group and how its blocks are kept."""

    index: int
    key: str
    """"model/group"."""
    model: str
    stride: int
    window: int | None


@frozen
class BestEffort:
    """A model whose state a prefix hit may lack: a drafter."""

    name: str
    whole: tuple[int, ...]
    """Indices of its groups without a window."""
    windows: bool
    slots: bool

    @property
    def exact(self) -> bool:
        """Its state can only be restored where a checkpoint was made."""
        return self.windows or self.slots


@frozen
class Groups:
    """Everything the layouts say about blocks."""

    every: tuple[GroupInfo, ...]
    whole: tuple[GroupInfo, ...]
    windowed: tuple[GroupInfo, ...]
    best_effort: tuple[BestEffort, ...]
    exact: bool
    """A prefix hit must end at a checkpoint: a model it may not lack has slots or windows."""
    granularity: int
    """Where any hit may end, otherwise: no entry of such a model is half filled there."""


def read_groups(layouts: Mapping[str, StateLayout]) -> Groups:
    """layouts: by model name."""
    pairs = [(model, group) for model, layout in layouts.items() for group in layout.groups]
    every = tuple(
        GroupInfo(index, f"{model}/{group.name}", model, group.stride, group.window)
        for index, (model, group) in enumerate(pairs)
    )
    strict = [layout for layout in layouts.values() if not layout.best_effort]
    return Groups(
        every=every,
        whole=tuple(group for group in every if group.window is None),
        windowed=tuple(group for group in every if group.window is not None),
        best_effort=tuple(_best_effort(layouts, every)),
        exact=any(layout.slots or any(g.window is not None for g in layout.groups) for layout in strict),
        granularity=lcm(*(group.stride for layout in strict for group in layout.groups)),
    )


def _best_effort(layouts: Mapping[str, StateLayout], groups: tuple[GroupInfo, ...]) -> Iterator[BestEffort]:
    for name, layout in layouts.items():
        if layout.best_effort:
            own = [group for group in groups if group.model == name]
            whole = tuple(group.index for group in own if group.window is None)
            yield BestEffort(name, whole, windows=len(whole) < len(own), slots=bool(layout.slots))


def check_store(store: StateStore, groups: Groups) -> None:
    """The store must hold exactly these groups, in blocks every stride divides; else PlanError."""
    problems = []
    want, have = {group.key for group in groups.every}, set(store.groups)
    if want != have:
        problems.append(
            Problem(
                f"The state store holds groups {sorted(have)}, the layouts name {sorted(want)}.",
                "Allocate the store from the same layouts.",
            )
        )
    size = store.sizes.block_tokens
    problems += [
        Problem(
            f"Group {group.key!r} has an entry per {group.stride} tokens; a block of {size} tokens cuts one.",
            f"Choose a block size that is a multiple of {group.stride}.",
        )
        for group in groups.every
        if size % group.stride
    ]
    if problems:
        raise PlanError(problems)
