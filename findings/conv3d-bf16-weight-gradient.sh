#!/usr/bin/env bash
# The gradient of a Conv3d's weight in bf16 on a CPU is not finite if the input is 2 voxels wide (in its first
# dimension, the depth; height and width do not matter): torch leaves the product
# to oneDNN, whose result holds inf or nan, or values that differ from call to call. Widths of 1, 3 and 4 are right, and
# so is torch's own kernel (torch.backends.mkldnn.flags(enabled=False)). There is no error. A network that halves
# volumes, such as CosmoFlow at 32^3, has such a layer, and its loss leaves the one in fp32 after a few steps.
#
# torch 2.13.0 (CPU, with AVX-512), seen on 2026-11-29.
# Source: tried; page: torch.nn.Conv3d and torch.amp, which name no sizes that are unsafe in bf16. pytorch issue 169688 is
# a neighbour: wrong outputs of strided bf16 convolutions whose output is 1 wide.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install torch==2.13.0 numpy==2.4.6
cat >"$folder/finding.py" <<'EOF'
"""Gradients of the weight of a padded 3^3 convolution of 64 channels, bf16 against fp32, by the width of the input."""

import math
import sys

import torch

CALLS = 8


def difference(width: int) -> float:
    """Returns the largest difference of several gradients, over the largest entry; inf if any is not finite."""
    torch.manual_seed(0)
    shape, largest = (64, 64, 3, 3, 3), 0.0
    for _ in range(CALLS):
        volume, gradient = torch.randn(2, 4, 64, *[width] * 3)
        exact = torch.nn.grad.conv3d_weight(volume, shape, gradient, padding=1)
        low = torch.nn.grad.conv3d_weight(volume.bfloat16(), shape, gradient.bfloat16(), padding=1).float()
        apart = float((low - exact).abs().max() / exact.abs().max())
        largest = max(largest, apart if math.isfinite(apart) else math.inf)
    return largest


seen = {width: difference(width) for width in (1, 2, 3, 4)}
with torch.backends.mkldnn.flags(enabled=False):
    seen_without = difference(2)
for width, apart in seen.items():
    print(f"width {width}: {apart:.3g} of the largest entry")
print(f"width 2 without oneDNN: {seen_without:.3g}")
right = [apart < 0.05 for width, apart in seen.items() if width != 2]
if not all(right) or seen_without > 0.05 or seen[2] < 0.5:
    sys.exit("changed: only width 2 by oneDNN was wrong, by half of the largest entry or more")
EOF
"$folder/venv/bin/python" -W ignore "$folder/finding.py"
