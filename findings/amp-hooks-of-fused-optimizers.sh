#!/usr/bin/env bash
# With `torch.amp.GradScaler` a step whose gradients overflow is skipped. Of a fused optimizer (`fused=True`) `step` is
# called all the same, and the kernel leaves out the update: so hooks of steps run for steps that did not happen, and
# hooks before a step see gradients still multiplied by the scale (65,536 by default), while with any other optimizer they
# see true gradients and run for true steps only. A gradient norm logged in such a hook, an average of weights or a count
# of steps changes its meaning with `fused=True`, which is chosen for speed.
#
# torch 2.13.0 (CPU), seen on 2026-11-28.
# Source: GradScaler.step in torch/amp/grad_scaler.py (`_step_supports_amp_scaling`); page: torch.amp, torch.optim hooks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install torch==2.13.0 numpy==2.4.6
cat >"$folder/finding.py" <<'EOF'
"""What hooks of AdamW see of a good step and of one with an infinite gradient, foreach and fused."""

import sys

import torch

SCALE = 1024.0


def hooks_of(fused: bool) -> dict[str, object]:
    weights = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weights], lr=0.1, fused=fused, foreach=not fused)
    norms, ended = [], []
    optimizer.register_step_pre_hook(lambda *_: norms.append(weights.grad.norm().item()))
    optimizer.register_step_post_hook(lambda *_: ended.append("step"))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale((2 * weights).sum()).backward()
    scaler.step(optimizer)
    norm_of_good_step, good = norms[0], len(ended)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale((2 * weights).sum()).backward()
    weights.grad[0] = float("inf")
    before = weights.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(before, weights), "the step was not skipped"
    return {"norm": norm_of_good_step, "hooks of good step": good, "hooks of skipped step": len(ended) - good}


def main() -> None:
    seen = {name: hooks_of(fused) for name, fused in (("foreach", False), ("fused", True))}
    for name, hooks in seen.items():
        print(f"{name}: {hooks} (the true norm is 4)")
    foreach = {"norm": 4.0, "hooks of good step": 1, "hooks of skipped step": 0}
    fused = {"norm": 4.0 * SCALE, "hooks of good step": 1, "hooks of skipped step": 1}
    if seen != {"foreach": foreach, "fused": fused}:
        sys.exit(f"changed: hooks were {foreach} and, fused, {fused}")


if __name__ == "__main__":
    main()
EOF
"$folder/venv/bin/python" -W ignore "$folder/finding.py"
