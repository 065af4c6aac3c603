"""When the state of a stopped sequence is worth a copy in host memory."""

from __future__ import annotations

from attrs import frozen

from luce_core.contracts import BackendPlan

HOST_LINK_BYTES_S = 25e9
"""Where a device does not say: 80 % of what PCIe 4.0 x16 carries each way by its specification, 31.5e9."""


@frozen
class SwapRule:
    """Copying goes over the link twice; computing again reads the weights once a chunk, at the very least.

    So a copy is made only where it wins even against a device that computes for nothing.
    """

    budget_bytes: int
    pass_bytes: int
    """Weights one chunk reads."""
    chunk: int
    link_share: float
    """Speed of the link to host memory, of the device's own memory as 1."""

    def most_bytes(self, tokens: int) -> int:
        """What state of `tokens` tokens may take to be worth its copies."""
        if not self.budget_bytes:
            return 0
        passes = -(-tokens // self.chunk)
        return int(passes * self.pass_bytes * self.link_share / 2)


def swap_rule(plan: BackendPlan) -> SwapRule:
    """The rule for a plan. On the CPU the link is memory itself."""
    model = plan.models[0]
    device = next(item for item in plan.devices if item.id == model.layer_device[0])
    link = device.bandwidth_bytes_s
    if "cpu" not in device.features and device.id != "cpu":
        link = min(link, device.links.get("cpu", HOST_LINK_BYTES_S))
    chunk = plan.number("engine.row_budget")
    return SwapRule(
        plan.number("cache.swap_bytes"), _pass_bytes(plan), chunk, link / device.bandwidth_bytes_s
    )


def _pass_bytes(plan: BackendPlan) -> int:
    """Weights a chunk reads: all models follow the text; of the target's experts only those in use."""
    everything = sum(claim.num_bytes for claim in plan.claims if claim.kind == "weights")
    target, spec = plan.number("memory.weight_bytes"), plan.models[0].spec
    idle = target * (spec.weight_bytes - spec.active_bytes) // max(1, spec.weight_bytes)
    return everything - max(0, idle)
