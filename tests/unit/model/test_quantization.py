"""How weights are held in 4 bits: which ones, in how many bytes, and that no forward changes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ConfigError
from rl_vlm.log.messages import parameters_line
from rl_vlm.model.loading import load_model
from rl_vlm.model.quantization import keep_format
from tests.helpers.builders import make_policy
from tests.tiny.build import build_tiny

BITSANDBYTES: Any = pytest.importorskip("bitsandbytes.nn", reason="needs bitsandbytes")
QLORA: dict[str, Any] = {"use_peft": True, "load_in_4bit": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


def test_without_bitsandbytes_the_extra_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    config = ModelConfig(model_name_or_path=str(checkpoint), **QLORA)
    with pytest.raises(
        ConfigError, match=r"model.load_in_4bit needs bitsandbytes.*pip install -e '\.\[bitsandbytes\]'"
    ):
        load_model(str(checkpoint), None, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_layers_of_the_language_model_are_quantized(checkpoint: Path, dtype: str) -> None:
    model = make_policy(checkpoint, dtype=dtype, **QLORA).transformer
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    in_4bit = {name for name, module in model.named_modules() if isinstance(module, BITSANDBYTES.Linear4bit)}
    assert {name.removesuffix(".base_layer").split(".")[-1] for name in in_4bit} == layers
    assert len(in_4bit) == 2 * len(layers)
    assert all(name.startswith("model.language_model.layers.") for name in in_4bit)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert {dtypes.pop(f"{name}.weight") for name in in_4bit} == {torch.uint8}
    adapter = {dtypes.pop(name) for name in list(dtypes) if ".lora_" in name}
    assert (adapter, set(dtypes.values())) == ({torch.float32}, {getattr(torch, dtype)})


def test_parameters_are_counted_as_weights(checkpoint: Path) -> None:
    dense = parameters_line(make_policy(checkpoint, use_peft=True))
    # Two layers of 96 x 96 (q, o), 96 x 32 (k, v) and 96 x 384 (gate, up, down) weights.
    num_quantized = 2 * (2 * 96 * 96 + 2 * 96 * 32 + 3 * 96 * 384)
    assert parameters_line(make_policy(checkpoint, **QLORA)) == f"{dense}, {num_quantized / 1000:.3g}K in 4 bits"


@pytest.mark.parametrize(
    ("nested", "scale_bytes"),
    [
        (False, 4 / 64),  # a scale in float32 for each block of 64 weights
        (True, 1 / 64 + 4 / (64 * 256)),  # a scale in 8 bits, and one in float32 for 256 of them
    ],
)
def test_bytes_per_weight(nested: bool, scale_bytes: float) -> None:
    weight = BITSANDBYTES.Params4bit(torch.randn(1024, 1024), quant_type="nf4", compress_statistics=nested).to("cpu")
    state: Any = weight.quant_state
    scales = [state.absmax, *([state.state2.absmax] if nested else [])]
    assert (weight.nbytes + sum(scale.nbytes for scale in scales)) / 1024**2 == 0.5 + scale_bytes


@pytest.mark.parametrize("nested", [False, True])
def test_a_forward_in_eval_mode_changes_no_weight(nested: bool) -> None:
    """Also on CPUs for which bitsandbytes has another format; elsewhere this passes in any case."""
    layer = BITSANDBYTES.LinearNF4(64, 64, compute_dtype=torch.float32, compress_statistics=nested).to("cpu")
    model, x = nn.Sequential(layer), torch.randn(3, 64)
    keep_format(model)
    before, expected = layer.weight.data.clone(), model(x)
    with torch.no_grad():
        found = model.eval()(x)
    assert torch.equal(found, expected)
    assert torch.equal(layer.weight.data, before)
    x.requires_grad_()
    model.train()(x).sum().backward()
    assert x.grad is not None
