"""Which rank writes which part of a checkpoint, so that no rank holds more than its share."""

import torch

from rl_vlm.distributed.optimizer_files import choose_writers
from rl_vlm.model.saving import split_into_files


def test_each_state_goes_to_the_rank_with_the_smallest_share():
    # Weights at even places and biases at odd ones, as in a model: taking turns would give one rank all weights.
    assert choose_writers([8, 1, 8, 1, 8, 1], num_ranks=2) == [0, 1, 1, 0, 0, 1]
    assert choose_writers([5, 3, 1], num_ranks=1) == [0, 0, 0]


def test_a_file_ends_with_the_block_that_reaches_its_size():
    blocks = [[(name, torch.zeros(n))] for name, n in (("a", 3), ("b", 1), ("c", 6), ("d", 2), ("e", 2))]
    files = split_into_files(blocks, max_bytes=16)
    assert [[name for block in file for name, _ in block] for file in files] == [["a", "b"], ["c"], ["d", "e"]]
