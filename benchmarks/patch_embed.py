"""Patch embedding as a convolution, the form in checkpoints, and as a matrix product with the same weights.

    python benchmarks/patch_embed.py --json result.json

If stride = kernel, each patch is multiplied by the kernel once, so that both forms compute the same sums. Qwen-VL's
processors give the tower patches already cut out (Conv3d on one patch each). SigLIP's and CLIP's give it images
(Conv2d), which the linear form cuts into patches first. Times are of forward and backward to the weights, alternating.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

import torch
from torch import Tensor, nn

from benchmarks.common import alternate, environment, ratio
from benchmarks.report import finish, patch_embed_table, result_arguments


@dataclass(frozen=True)
class Case:
    """One checkpoint's patch embedding on its usual input."""

    conv: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    """(patches, values) if already cut out, or (images, channels, height, width)."""


CASES = {
    "Qwen2-VL-2B, 4,096 patches": Case(lambda: nn.Conv3d(3, 1280, (2, 14, 14), (2, 14, 14), bias=False), (4096, 1176)),
    "Qwen2.5-VL-3B, 4,000 patches": Case(
        lambda: nn.Conv3d(3, 1280, (2, 14, 14), (2, 14, 14), bias=False), (4000, 1176)
    ),
    "small shape, 4,000 patches": Case(lambda: nn.Conv3d(3, 240, (2, 7, 7), (2, 7, 7), bias=False), (4000, 294)),
    "SigLIP-so400m, 4 x 384^2": Case(lambda: nn.Conv2d(3, 1152, 14, 14), (4, 3, 384, 384)),
    "CLIP-L, 4 x 336^2": Case(lambda: nn.Conv2d(3, 1024, 14, 14, bias=False), (4, 3, 336, 336)),
}


def convolution(conv: nn.Module, values: Tensor) -> Tensor:
    """Compute (patches, embedding) as the towers' own code does."""
    if values.ndim == 2:
        weight: Any = conv.weight
        return conv(values.view(-1, *weight.shape[1:])).flatten(1)
    return conv(values).flatten(2).transpose(1, 2).flatten(0, 1)


def linear(conv: nn.Module, values: Tensor) -> Tensor:
    """Compute the same values by one matrix product."""
    weight: Any = conv.weight
    bias: Any = conv.bias
    patches = values if values.ndim == 2 else cut(values, weight.shape[-1])
    return nn.functional.linear(patches, weight.flatten(1), bias)


def cut(images: Tensor, size: int) -> Tensor:
    """Cut (images, channels, height, width) into (patches, channels * size * size) without pixels beyond them."""
    rows, columns = images.shape[2] // size, images.shape[3] // size
    images = images[:, :, : rows * size, : columns * size]
    parts = images.unflatten(3, (columns, size)).unflatten(2, (rows, size))  # (N, C, rows, size, columns, size)
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)


def measure_case(case: Case, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    conv, values = case.conv(), torch.randn(case.input_shape)

    def gradient(form: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        conv.zero_grad()
        output = form(conv, values)
        (output * output.detach()).sum().backward()
        grad: Any = conv.weight.grad
        return grad.clone()

    with torch.no_grad():
        outputs = convolution(conv, values), linear(conv, values)
    gradients = gradient(convolution), gradient(linear)  # warms up as well
    seconds = alternate({"conv": lambda: gradient(convolution), "linear": lambda: gradient(linear)}, repeats)
    return {
        "speedup": ratio(seconds, "conv", "linear"),
        "seconds": seconds,
        "max_output_difference": float((outputs[0] - outputs[1]).abs().max()),
        "max_gradient_difference": float((gradients[0] - gradients[1]).norm() / gradients[0].norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    result_arguments(parser)
    args = parser.parse_args()
    cases = {name: measure_case(case, args.repeats) for name, case in CASES.items()}
    result = {"benchmark": "patch_embed", "cases": cases, **environment()}
    finish(result, patch_embed_table([result]), args)


if __name__ == "__main__":
    main()
