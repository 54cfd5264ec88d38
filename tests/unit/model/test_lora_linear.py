"""LoRA in one function against PEFT's own layers: outputs, gradients, and what is left to PEFT."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear, ParamWrapper
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText

from rl_vlm.model import lora_linear
from rl_vlm.model.lora_linear import LoraLinear, LoraProduct, with_lora_linear
from rl_vlm.model.policy import Policy
from rl_vlm.types import Forward
from tests.helpers.builders import (
    gradient_error,
    make_group,
    make_policy,
    make_prompt,
    noise_image,
    sharp_checkpoint,
    take_gradients,
    whole,
)

IN, OUT = 96, 160


class OneLayer(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT, bias=bias)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.layer(x, **kwargs)


def peft_model(ours: bool, bias: bool = True, **settings: Any) -> Any:
    """One linear layer with an adapter that has an effect. The same arguments give the same weights."""
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=["layer"], init_lora_weights=False, **settings)
    return get_peft_model(OneLayer(bias), with_lora_linear(config) if ours else config)


def run(model: Any, x: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of the weights and of the input."""
    torch.manual_seed(1)  # of dropout
    output = model(x, **kwargs)
    output.float().mul(torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = take_gradients(model) | ({} if x.grad is None else {"x": x.grad})
    x.grad = None
    return output.detach(), gradients


def is_in_one_function(output: Tensor) -> bool:
    return type(output.grad_fn).__name__ == f"{LoraProduct.__name__}Backward"


@pytest.mark.parametrize("shape", [(IN,), (7, IN), (2, 5, IN)])
@pytest.mark.parametrize("settings", [{"bias": False}, {"lora_alpha": 24}, {"use_rslora": True}])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_outputs_and_gradients_are_those_of_peft(
    shape: tuple[int, ...], settings: dict[str, Any], needs_gradient: bool
) -> None:
    x = torch.randn(shape).requires_grad_(needs_gradient)
    stock, ours = peft_model(False, **settings), peft_model(True, **settings)
    assert is_in_one_function(ours(x))
    (expected, its_gradients), (output, gradients) = run(stock, x), run(ours, x)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    assert set(gradients) == {
        *(n for n, p in stock.named_parameters() if "lora_" in n),
        *(["x"] if needs_gradient else []),
    }
    assert gradient_error(gradients, its_gradients) <= 1e-6


def test_the_input_may_have_no_rows() -> None:
    output, gradients = run(peft_model(True), torch.randn(2, 0, IN, requires_grad=True))
    assert output.shape == (2, 0, OUT)
    assert all(not gradient.any() for gradient in gradients.values())


def test_the_input_may_be_a_transposed_view() -> None:
    x = torch.randn(IN, 7).T.requires_grad_()
    expected, output = run(peft_model(False), x), run(peft_model(True), x)
    torch.testing.assert_close(output[0], expected[0])
    assert gradient_error(output[1], expected[1]) <= 1e-6


def test_autocast_is_no_less_precise_than_in_peft() -> None:
    """Weights are in bfloat16, as frozen weights of a run, and adapters in float32."""
    x = torch.randn(512, IN)
    layers = {"exact": peft_model(False), "PEFT": peft_model(False), "ours": peft_model(True)}
    for model in layers.values():
        model.base_model.model.layer.base_layer.to(torch.bfloat16)
    layers["exact"].double()
    exact = run(layers["exact"], x.bfloat16().double().requires_grad_())
    errors: dict[str, list[float]] = {}
    for name in ("PEFT", "ours"):
        with torch.autocast("cpu", torch.bfloat16):
            output, gradients = run(layers[name], x.bfloat16().requires_grad_())
        assert output.dtype == torch.bfloat16
        assert all(gradient.dtype == torch.float32 for weight, gradient in gradients.items() if weight != "x")
        pairs = [(output, exact[0]), *((gradients[weight], exact[1][weight]) for weight in sorted(exact[1]))]
        errors[name] = [float((found - true).norm() / true.norm()) for found, true in pairs]
    assert all(0 < ours <= 1.02 * its for ours, its in zip(errors["ours"], errors["PEFT"], strict=True)), errors


def test_under_autocast_no_activation_is_in_float32() -> None:
    saved: list[Tensor] = []
    model = peft_model(True)
    model.base_model.model.layer.base_layer.to(torch.bfloat16)
    x = torch.randn(512, IN, dtype=torch.bfloat16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with torch.autocast("cpu", torch.bfloat16), hooks:
        assert is_in_one_function(model(x))
    assert {tensor.dtype for tensor in saved} == {torch.bfloat16}


class Dtypes(TorchDispatchMode):
    """Notes the dtypes of all tensors of a shape that are made."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found |= {x.dtype for x in tree_leaves(out) if isinstance(x, Tensor) and x.shape == self.shape}
        return out


def test_pefts_forward_of_sharded_weights_does_not_cast_its_input() -> None:
    x = torch.randn(7, IN, dtype=torch.bfloat16, requires_grad=True)
    models = {ours: peft_model(ours) for ours in (True, False)}
    found: dict[bool, set[torch.dtype]] = {}
    outputs = []
    for ours, model in models.items():
        model.base_model.model.layer.base_layer.to(torch.bfloat16)
        shard_base(model)
        with torch.autocast("cpu", torch.bfloat16), Dtypes((7, IN)) as dtypes:
            outputs.append(run(model, x))
        found[ours] = dtypes.found
    assert found == {True: {torch.bfloat16}, False: {torch.bfloat16, torch.float32}}
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert all(torch.equal(gradient, outputs[1][1][name]) for name, gradient in outputs[0][1].items())


def test_other_precisions_are_left_to_peft() -> None:
    x = torch.randn(3, IN, dtype=torch.bfloat16, requires_grad=True)
    models = [peft_model(ours) for ours in (True, False)]
    for model in models:
        model.base_model.model.layer.base_layer.to(torch.bfloat16)
    output, expected = (model(x) for model in models)
    assert not is_in_one_function(output)
    assert torch.equal(output, expected)


def merge(model: Any) -> None:
    model.merge_adapter()


def disable(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def add_another(model: Any) -> None:
    model.add_adapter("other", LoraConfig(r=2, target_modules=["layer"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])


def train_base(model: Any) -> None:
    model.base_model.model.layer.base_layer.weight.requires_grad_()


def shard_base(model: Any) -> None:
    model.base_model.model.layer.base_layer.weight.ds_id = 0  # as DeepSpeed marks it


def evaluate(model: Any) -> None:
    model.eval()


def nothing(model: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("settings", "change", "kwargs"),
    [
        ({"use_dora": True}, nothing, {}),
        ({"lora_bias": True}, nothing, {}),
        ({"lora_dropout": 0.5}, nothing, {}),
        ({}, merge, {}),
        ({}, disable, {}),
        ({}, add_another, {}),
        ({}, train_base, {}),
        ({}, shard_base, {}),
        ({}, evaluate, {"adapter_names": ["default", "__base__", "default"]}),
    ],
    ids=["DoRA", "bias", "dropout", "merged", "disabled", "two adapters", "trained base", "ZeRO-3", "adapter names"],
)
def test_all_but_plain_lora_is_left_to_peft(
    settings: dict[str, Any], change: Callable[[Any], None], kwargs: dict[str, Any]
) -> None:
    x = torch.randn(3, IN, requires_grad=True)
    models = [peft_model(ours, **settings) for ours in (True, False)]
    for model in models:
        torch.manual_seed(2)  # of another adapter
        change(model)
    assert isinstance(models[0].base_model.model.layer, LoraLinear)
    assert not is_in_one_function(models[0](x, **kwargs))
    output, expected = (run(model, x, **kwargs) for model in models)
    assert torch.equal(output[0], expected[0])
    assert output[1].keys() == expected[1].keys()
    assert all(torch.equal(gradient, expected[1][name]) for name, gradient in output[1].items())


@pytest.mark.parametrize("off", [lambda model: model.eval(), lambda model: setattr(dropout_of(model), "p", 0.0)])
def test_dropout_that_is_off_is_plain_lora(off: Callable[[Any], Any]) -> None:
    model = peft_model(True, lora_dropout=0.5)
    off(model)
    assert is_in_one_function(model(torch.randn(3, IN)))


def dropout_of(model: Any) -> Any:
    return model.base_model.model.layer.lora_dropout["default"]


def test_a_merged_layer_has_the_same_outputs() -> None:
    model, x = peft_model(True), torch.randn(3, IN)
    expected = model(x)
    torch.testing.assert_close(model.merge_and_unload()(x), expected, atol=1e-5, rtol=1e-5)


class OtherLinear(nn.Linear):
    """A linear layer that may compute something else, as layers in 4 bits do."""


def test_peft_creates_the_layers_of_other_modules() -> None:
    model = OneLayer()
    model.layer = OtherLinear(IN, OUT)
    peft: Any = get_peft_model(model, with_lora_linear(LoraConfig(target_modules=["layer"])))
    assert type(peft.base_model.model.layer) is Linear


def test_peft_creates_the_adapters_of_parameters() -> None:
    peft: Any = get_peft_model(OneLayer(), with_lora_linear(LoraConfig(target_parameters=["layer.weight"])))
    assert type(peft.base_model.model.layer) is ParamWrapper


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def scores(policy: Policy, checkpoint: Path) -> tuple[Tensor, dict[str, Tensor]]:
    group = make_group(make_prompt(checkpoint, [noise_image(32, 24, seed=0)]), [5, 1, 9])
    logprobs = policy(Forward(whole([group], shared=True))).logprobs_NT
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
    return logprobs.detach(), take_gradients(policy)


def test_weights_in_4_bits_keep_the_layers_of_peft() -> None:
    config = with_lora_linear(LoraConfig(target_modules=["layer"]), in_4bit=True)
    assert config._custom_modules is None


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_policy_has_the_gradients_of_pefts_layers(
    checkpoint: Path, gradient_checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter on the vision tower too."""
    settings: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_exclude_modules": []}
    ours = make_policy(checkpoint, gradient_checkpointing=gradient_checkpointing, **settings)
    monkeypatch.setattr(lora_linear, "with_lora_linear", lambda config, in_4bit: config)
    stock = make_policy(checkpoint, **settings)
    assert any(isinstance(module, LoraLinear) for module in ours.modules())
    assert not any(isinstance(module, LoraLinear) for module in stock.modules())
    (logprobs, gradients), (expected, its_gradients) = scores(ours, checkpoint), scores(stock, checkpoint)
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-6)
    assert gradient_error(gradients, its_gradients) <= 2e-6


def test_stock_peft_loads_the_adapter(checkpoint: Path, tmp_path: Path) -> None:
    policy = make_policy(checkpoint, use_peft=True, lora_r=4)
    policy.model.save_pretrained(tmp_path / "ours")
    base = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    stock = PeftModel.from_pretrained(base, str(tmp_path / "ours"))
    assert not any(isinstance(module, LoraLinear) for module in stock.modules())
    stock.save_pretrained(str(tmp_path / "stock"))
    assert adapter_config(tmp_path / "ours") == adapter_config(tmp_path / "stock")
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        found, expected = (model(input_ids=ids).logits.log_softmax(-1) for model in (policy.model.eval(), stock.eval()))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert (expected - base_logprobs(stock, ids)).abs().max() > 1e-2


def adapter_config(directory: Path) -> dict[str, Any]:
    """Return an adapter's config. PEFT writes the names of modules in any order."""
    found = json.loads((directory / "adapter_config.json").read_text())
    return found | {"target_modules": sorted(found["target_modules"])}


def base_logprobs(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        return model(input_ids=ids).logits.log_softmax(-1)
