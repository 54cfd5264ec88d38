"""What is refused of models and processors in memory, and their digests."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_vlm.errors import ConfigError, ModelError
from rl_vlm.model import in_memory
from rl_vlm.model.in_memory import HeldModel, digest_of_weights, refuse_second_copy, written_by


class Model(torch.nn.Linear):
    """Six weights with a config, which is written as one file."""

    def __init__(self, origin: str = "some/model") -> None:
        super().__init__(2, 3, bias=False)
        torch.nn.init.ones_(self.weight)
        self.config: Any = SimpleNamespace(name_or_path=origin, to_json_string=lambda: "{}")

    def save_pretrained(self, directory: Any) -> None:
        directory.mkdir()
        (directory / "weights").write_text(str(self.weight.tolist()))


class Processor:
    image_processor = None

    def __init__(self, text: str) -> None:
        self.text = text

    def save_pretrained(self, directory: Any) -> None:
        with open(f"{directory}/processor", "w") as file:
            file.write(self.text)


def test_a_digest_covers_every_weight():
    model, other = Model(), Model()
    assert digest_of_weights(model) == digest_of_weights(other)
    with torch.no_grad():
        other.weight[2, 1] = 1.5
    assert digest_of_weights(model) != digest_of_weights(other)
    assert digest_of_weights(model) != digest_of_weights(Model().bfloat16())


def test_a_digest_covers_the_processor():
    digests = [HeldModel(Model(), processor).digest for processor in (None, *map(Processor, "aab"))]
    assert digests[1] == digests[2] and len(set(digests)) == 3


def test_a_model_is_written_once(tmp_path):
    held = HeldModel(Model(), Processor("a"))
    held(tmp_path / "written", 0)
    assert (tmp_path / "written" / "weights").read_text() == "[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]"
    assert (tmp_path / "written" / "processor").read_text() == "a"
    with pytest.raises(ModelError, match="written by an earlier call and deleted since: make a new trainer"):
        held(tmp_path / "again", 0)


def test_only_the_model_of_a_directory_is_linked(tmp_path):
    (tmp_path / "source").mkdir()
    for name in ("model.safetensors", "config.json", "chat_template.jinja", "tokenizer.json"):
        (tmp_path / "source" / name).touch()
    write = written_by(str(tmp_path / "source"), Processor("a"))
    write(tmp_path / "written", 0)
    assert sorted(path.name for path in (tmp_path / "written").iterdir()) == [
        "config.json", "model.safetensors", "processor",
    ]  # fmt: skip


def test_objects_that_cannot_be_written():
    adapter = Model()
    vars(adapter)["peft_config"] = {}
    for model, processor, message in (
        (adapter, None, "model is a Model in memory: give its base model, and peft_config for a new adapter"),
        (Model(origin=""), None, "was not loaded from a checkpoint: give its processor as processing_class"),
        (lambda directory, seed: None, Processor("a"), "processing_class is for a model that is an object, a hub name"),
    ):
        with pytest.raises(ConfigError, match=message):
            written_by(model, processor)


def test_host_memory_holds_both_copies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(in_memory, "free_host_memory", lambda: 48)
    refuse_second_copy(Model(), bytes_per_weight=4, num_copies=2)
    monkeypatch.setattr(in_memory, "free_host_memory", lambda: 47)
    with pytest.raises(ConfigError, match="model is a Model in memory, and stays there: to load it again, the run"):
        refuse_second_copy(Model(), bytes_per_weight=4, num_copies=2)
