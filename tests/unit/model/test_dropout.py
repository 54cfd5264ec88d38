import logging
from typing import Any

import pytest
import torch
from torch import nn

from rl_vlm.model.dropout import disable_dropout, fix_statistics


class Config:
    """As those of transformers, it has `to_dict`."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, True


class PatchDropout(nn.Module):
    def __init__(self, prob: float) -> None:
        super().__init__()
        self.prob, self.num_prefix_tokens = prob, 1


class Layer(nn.Module):
    """Rates of every kind, and numbers that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout, self.layerdrop, self.p, self.drop_last = 0.1, 0.2, 0.5, True
        self.dropout, self.path, self.patches = nn.Dropout(0.3), DropPath(0.4), PatchDropout(0.5)
        self.config = Config(activation_dropout=0.6, eps=1e-5)


@pytest.fixture
def model() -> Any:
    model: Any = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})
    model.config = Config(text_config=Config(drop_path_rate=0.7, hidden_size=8), dropout=0.0)
    return model


def test_every_rate_is_0_and_every_other_number_stays(model):
    disable_dropout(model)
    for layer in model["layers"]:
        assert (layer.attention_dropout, layer.layerdrop, layer.p, layer.drop_last) == (0.0, 0.0, 0.5, True)
        assert (layer.dropout.p, layer.path.drop_prob, layer.patches.prob) == (0.0, 0.0, 0.0)
        assert (layer.path.scale_by_keep, layer.patches.num_prefix_tokens) == (True, 1)
        assert vars(layer.config) == {"activation_dropout": 0.0, "eps": 1e-5}
    assert vars(model.config.text_config) == {"drop_path_rate": 0.0, "hidden_size": 8}
    values = torch.randn(8)
    assert torch.equal(model["layers"][0].dropout.train()(values), values)


def test_the_log_names_each_rate_once(model, caplog):
    disable_dropout(model)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "dropout is off, in training as in rollouts: layers.*.attention_dropout was 0.1, layers.*.layerdrop was 0.2, "
        "layers.*.dropout.p was 0.3, layers.*.path.drop_prob was 0.4, layers.*.patches.prob was 0.5, "
        "Config.drop_path_rate was 0.7, Config.activation_dropout was 0.6"
    )
    caplog.clear()
    disable_dropout(model)
    assert not caplog.records


def test_the_dropout_of_adapters_is_0_in_their_configs_too():
    model: Any = nn.Linear(2, 2)
    model.peft_config = {"default": Config(lora_dropout=0.05), "initial": Config(lora_dropout=0.1)}
    disable_dropout(model)
    assert [vars(config) for config in model.peft_config.values()] == [{"lora_dropout": 0.0}] * 2


def test_batch_norms_keep_their_statistics_in_training():
    norm: Any = nn.BatchNorm2d(1)
    norm.running_mean.fill_(2.0)
    norm.running_var.fill_(4.0 - norm.eps)
    model = nn.Sequential(norm, nn.Conv2d(1, 1, 1))
    fix_statistics(model)
    model.train()
    assert norm(torch.full((3, 1, 1, 1), 6.0)).flatten().tolist() == [2.0, 2.0, 2.0]
    assert norm.running_mean.item() == 2.0
    assert model[1].training
    assert isinstance(norm, nn.BatchNorm2d)
    assert list(model.state_dict()) == [
        "0.weight", "0.bias", "0.running_mean", "0.running_var", "0.num_batches_tracked", "1.weight", "1.bias",
    ]  # fmt: skip
