# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN201
"""How kernels of a step begin before the one in front is done (compute capability 9.0 and newer)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Let the launch that follows begin, and wait for the one before: first in every kernel of a step, also
    where it finds nothing to do, so that whoever waits for it has waited for all.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The first half of `wait_for_previous`: what stands between the halves reads nothing that a launch which
    lets the next one start has written.

    Weights are such, and all numbers of a `ForwardBatch`: they come by copies from the host or by kernels of
    torch, and a step writes none of them over. Every forward begins with a launch that waits for all before
    it and lets nothing start (the table's rows), so that holds where steps run ahead of each other, too.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_only(OVERLAP: tl.constexpr):
    """The second half. Alone, in kernels that write what others read in front of their wait: the launch that
    follows begins when all of this one is done.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
