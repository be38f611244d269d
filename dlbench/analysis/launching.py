"""Idle time of GPUs within forward, backward and optimizer while the host was late with its calls.

Step files have, for each of these phases, an upper bound U of the device's wait for the host
(`dlbench.node.training.phases`). U may be far too large: if the host is just behind the device all through a phase, U
is the whole phase, though the device may have idled for a thousandth of it. The time D of a phase with U = 0 is that of
its kernels; for this purpose the device is held back in some steps of the warm-up. With B the median of those D, over
the n steps whose bound is above 0,

    idle = sum of D - n B,    but no less than 0 and no more than the sum of U.

It is exact if kernels take equally long in all steps. For a rank without such a step only the bound is known. With
gradient accumulation D and U are sums over the parts of a batch, all of which are held back.
"""

from __future__ import annotations

from dlbench.analysis.measures import UNKNOWN_NS, RunSteps
from dlbench.records.rows.steps import LAUNCHED
from dlbench.units import format_seconds


def waited_for_host(steps: RunSteps, *, synchronised: bool) -> tuple[dict[str, int] | None, str]:
    """Returns the idle nanoseconds of all ranks and measured steps by `LAUNCHED`, and their evidence; None and why not.

    `synchronised`: whether the run waited for the device after each phase.
    """
    if steps.launch is None:
        return dict.fromkeys(LAUNCHED, 0), ""
    if synchronised:
        return None, "measure.phases synchronised makes the device wait for the host after every phase"
    idle_ns, unknown_ns = dict.fromkeys(LAUNCHED, 0), 0
    for phase in LAUNCHED:
        bounds, kernels = steps.launch.bound_ns[phase], steps.launch.kernel_ns[phase]
        for rank, bound in enumerate(bounds):
            waits = bound > 0
            bound_ns = int(bound.sum())
            if kernels[rank] == UNKNOWN_NS:
                unknown_ns += bound_ns
                continue
            beyond = int(steps.phase_ns[phase][rank][waits].sum()) - int(waits.sum()) * int(kernels[rank])
            idle_ns[phase] += min(bound_ns, max(0, beyond))
    if unknown_ns:
        mean_s = unknown_ns / steps.step_ns.size / 1e9
        return None, (
            f"the device waited for the host for at most {format_seconds(mean_s)} per step; the time of its kernels "
            "alone is not known from any step of the warm-up: it is too short, or a phase has more kernels than fit "
            "into the launch queue"
        )
    bounds_ns = sum(int(bound.sum()) for bound in steps.launch.bound_ns.values())
    if not bounds_ns:
        return idle_ns, "the host was ahead of the device in every phase of every step"
    return idle_ns, "computing phases minus the time of their kernels alone, from steps in which the host was ahead"
