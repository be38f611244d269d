"""How long GPUs idled within forward, backward and optimizer because the host came late with its calls.

Step files hold, for each of these phases, how long the device waited for the host at most (`dlbench.node.training.
phases`): U >= idle, whatever the kernels are. That alone may say far too much: where the host is just behind the device
all through a phase, U is the whole phase, though the device may have idled for a thousandth of it. The time D of a
phase with U = 0 is that of its kernels; the warm-up has steps made so, for which the device was held back. With B their
median, over the n steps whose bound is above 0,

    idle = sum of D - n B,    but no less than 0 and no more than the sum of U.

It is exact where kernels take as long in each step as in those. A rank without such a step says nothing but its bound.
With gradient accumulation D and U are sums over the parts of a batch, all of which are held back.
"""

from __future__ import annotations

from dlbench.analysis.measures import UNKNOWN_NS, RunSteps
from dlbench.records.rows.steps import LAUNCHED
from dlbench.units import format_seconds


def waited_for_host(steps: RunSteps, *, synchronised: bool) -> tuple[dict[str, int] | None, str]:
    """Nanoseconds of all ranks and measured steps by `LAUNCHED`, and how they are known; None and why not.
    `synchronised`: whether the run waited for the device after each phase.
    """
    if steps.launch is None:
        return dict.fromkeys(LAUNCHED, 0), ""
    if synchronised:
        return None, "measure.phases synchronised makes the device wait for the host after every phase"
    found, unknown_ns = dict.fromkeys(LAUNCHED, 0), 0
    for phase in LAUNCHED:
        bounds, kernels = steps.launch.bound_ns[phase], steps.launch.kernel_ns[phase]
        for rank, bound in enumerate(bounds):
            waits = bound > 0
            most = int(bound.sum())
            if kernels[rank] == UNKNOWN_NS:
                unknown_ns += most
                continue
            beyond = int(steps.phase_ns[phase][rank][waits].sum()) - int(waits.sum()) * int(kernels[rank])
            found[phase] += min(most, max(0, beyond))
    if unknown_ns:
        mean_s = unknown_ns / steps.step_ns.size / 1e9
        return None, (
            f"the device waited for the host for {format_seconds(mean_s)} per step at most; no step of the warm-up "
            "shows what its kernels take alone: it is too short, or a phase has more kernels than the launch queue "
            "holds"
        )
    bounds_ns = sum(int(bound.sum()) for bound in steps.launch.bound_ns.values())
    if not bounds_ns:
        return found, "the host was ahead of the device in every phase of every step"
    return found, "what computing phases take beyond their kernels alone, as steps show in which the host was ahead"
