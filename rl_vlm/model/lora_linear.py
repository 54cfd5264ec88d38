"""Linear layers with LoRA as one autograd function. PEFT's own forward computes everything except plain LoRA.

forward    output = x Wᵀ + b,  then  output += scale (x Aᵀ) Bᵀ
backward   gradient of x = g W,  then  += scale (g B) A

PEFT adds the adapter by three passes over each linear layer's output, and under autocast casts the inputs to float32
and back.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_vlm.distributed.shards import is_shard

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import Linear
else:
    Linear = object

Config = TypeVar("Config")


def with_lora_linear(config: Config, in_4bit: bool = False) -> Config:
    """Let PEFT create `LoraLinear` layers for this adapter. The config is saved as before.

    PEFT has other layers for weights in 4 bits. The memory plan traces these models without 4 bits.
    """
    from peft import LoraConfig

    if isinstance(config, LoraConfig) and not in_4bit:
        layers: Any = {nn.Linear: lora_linear}
        config._register_custom_module(layers)
    return config


def lora_linear(
    target: nn.Module, adapter_name: str, config: LoraConfig, parameter_name: str | None = None, **kwargs: Any
) -> LoraLinear | None:
    """Create the layer of an adapter. Return None to let PEFT create it, for example for an expert's weights."""
    if type(target) is not nn.Linear or parameter_name is not None or config.fan_in_fan_out:
        return None
    return layer_class()(target, adapter_name, config=config, **kwargs)


@cache
def layer_class() -> Any:
    """Return `LoraLinear` as a subclass of PEFT's layer, which is not imported in runs without an adapter."""
    from peft.tuners.lora import Linear

    return type("LoraLinear", (LoraLinear, Linear), {})


@no_type_check  # the checks of tests cannot be compiled
class LoraLinear(Linear):
    """PEFT's LoRA layer, with plain LoRA computed by `LoraProduct`."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = None if args or kwargs else self.plain_adapter()
        if name is None:
            return super().forward(x, *args, **kwargs)
        base: Any = self.get_base_layer()
        factors: Any = (self.lora_A[name], self.lora_B[name])
        a, b = (factor.weight for factor in factors)
        dtype = base.weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        elif not x.dtype == a.dtype == b.dtype == dtype:
            return super().forward(x)
        inputs = (None if tensor is None else tensor.to(dtype) for tensor in (x, base.weight, base.bias, a, b))
        return LoraProduct.apply(*inputs, self.scaling[name])

    def _cast_input_dtype(self, x: Any, dtype: torch.dtype) -> Any:
        """Leave the input of PEFT's forward to autocast, which would cast it back. Variants of LoRA use its dtype."""
        if x is None or self.lora_variant or not torch.is_autocast_enabled(x.device.type):
            return super()._cast_input_dtype(x, dtype)
        return x

    def plain_adapter(self) -> str | None:
        """Return the name of the only active adapter if it is plain LoRA on whole frozen weights, without dropout.

        With ZeRO-3, each weight is gathered when its own module is called, as PEFT's forward does.
        """
        names = self.active_adapters
        if self.disable_adapters or self.merged or len(names) != 1 or names[0] not in self.lora_A:
            return None
        (name,) = names
        dropout: Any = self.lora_dropout[name]
        drops = self.training and not isinstance(dropout, nn.Identity) and dropout.p > 0
        other_base = any(p.requires_grad or is_shard(p) for p in self.get_base_layer().parameters())
        return None if drops or other_base or self.lora_bias[name] or name in self.lora_variant else name


@no_type_check
class LoraProduct(torch.autograd.Function):
    """A product with frozen weights and a low-rank adapter, all in one dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        low = rows @ a.T
        output = F.linear(x, weight, bias)  # no view is returned, since Llama 4 adds to its output in place
        output.view(-1, output.shape[-1]).addmm_(low, b.T, alpha=scale)
        ctx.save_for_backward(x, low, weight, a, b)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, low, weight, a, b = ctx.saved_tensors
        rows, of_rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, gradients[0]))
        of_low = of_rows @ b
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (of_rows @ weight).addmm_(of_low, a, alpha=ctx.scale).view(x.shape)
        return of_x, None, None, (of_low.T @ rows).mul_(ctx.scale), (of_rows.T @ low).mul_(ctx.scale), None
