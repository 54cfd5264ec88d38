"""What keeps memory per rank at its share: who writes which part of a checkpoint, tied weights, and buckets."""

from typing import Any

import pytest
import torch

from benchmarks.shapes import TOY, build_checkpoint
from rl_vlm.config.schema import ModelConfig, RunConfig
from rl_vlm.distributed.launch_variables import take_launch
from rl_vlm.distributed.optimizer_files import choose_writers
from rl_vlm.distributed.zero_config import zero_config
from rl_vlm.model.loading import empty_transformer
from rl_vlm.model.saving import split_into_files


def test_each_state_goes_to_the_rank_with_the_smallest_share():
    # Weights at even places and biases at odd ones, as in a model: taking turns would give one rank all weights.
    assert choose_writers([8, 1, 8, 1, 8, 1], num_ranks=2) == [0, 1, 1, 0, 0, 1]
    assert choose_writers([5, 3, 1], num_ranks=1) == [0, 0, 0]


def test_a_file_ends_with_the_block_that_reaches_its_size():
    blocks = [[(name, torch.zeros(n))] for name, n in (("a", 3), ("b", 1), ("c", 6), ("d", 2), ("e", 2))]
    files = split_into_files(blocks, max_bytes=16.0)
    assert [[name for block in file for name, _ in block] for file in files] == [["a", "b"], ["c"], ["d", "e"]]


def test_tied_weights_stay_tied_on_the_meta_device(tmp_path):
    """Ranks would broadcast unlike numbers of weights otherwise, and wait for each other."""
    model: Any = empty_transformer(str(build_checkpoint(TOY, tmp_path)), ModelConfig(model_name_or_path=str(tmp_path)))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight.is_meta


def test_buckets_of_the_launchers_own_file_follow_the_models_width(monkeypatch):
    """Those of DeepSpeed hold half a billion gradients, whatever the model."""
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    asked = take_launch().deepspeed
    config = RunConfig.model_validate({"model": {"model_name_or_path": "any"}})
    used = zero_config(asked, config, hidden_size=64, has_gpu=False)["zero_optimization"]
    assert used["reduce_bucket_size"] == 64 * 64
