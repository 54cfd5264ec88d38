"""PyTorch's limit on compiled graphs."""

import torch

GRAPHS = 64
"""Graphs that a function may have. Gradients, adapters, dense rows and kinds of layers all need their own, so that some
models reach PyTorch's own limit of 8. Then FlexAttention would fail, and layers would not be fused."""


def allow_graphs() -> None:
    """Raise PyTorch's limit on the graphs of a function to `GRAPHS` in this thread.

    The limit belongs to a thread. Autograd computes layers again in a thread of its device.
    """
    if torch._dynamo.config.recompile_limit < GRAPHS:
        torch._dynamo.config.recompile_limit = GRAPHS
