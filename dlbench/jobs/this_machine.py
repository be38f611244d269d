"""What this machine cannot do of a plan, as far as that shows before a rank starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from dlbench.errors import EnvironmentLacksError
from dlbench.machine.arithmetic import has_gpu, lacking_arithmetic
from dlbench.specs.plan import RunPlan

__all__ = ["has_gpu", "product_rate", "require_precision"]

# The best of five: others may compute at the same time. 1,024 is large enough for a library's best kernel.
_PRODUCT = """
import json, time, numpy
one = numpy.ones((1024, 1024), numpy.float32)
def seconds():
    start = time.perf_counter()
    one @ one
    return time.perf_counter() - start
print(json.dumps(2 * 1024**3 / min(seconds() for _ in range(5))))
"""
_ANSWER_S = 20
"""A machine that has not multiplied two matrices after so long is busy with other things."""


def require_precision(plan: RunPlan) -> None:
    """Proves that the ranks of a plan compute in its precision, if they run here.

    Raises:
        EnvironmentLacksError: the CPU has no arithmetic of that precision, and emulation was not asked for.
    """
    train = plan.workload.train
    lack = lacking_arithmetic(train.precision)
    if lack and train.precision == "tf32":
        raise EnvironmentLacksError(f"train.precision tf32: {lack}, and there is none here; use fp32")
    if lack and not train.allow_emulation:
        raise EnvironmentLacksError(
            f"train.precision {train.precision}: {lack}; use fp32, or train.allow_emulation=true to test its numerics"
        )


def product_rate() -> float | None:
    """FLOP/s of a product of two fp32 matrices on one core of this machine; None where numpy does not answer.

    Training does not reach it: what needs so many FLOPs takes at least as long as they do at this rate.
    """
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "BLIS", "VECLIB_MAXIMUM")}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PRODUCT],
            capture_output=True,
            timeout=_ANSWER_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **threads},
        )
        return float(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
