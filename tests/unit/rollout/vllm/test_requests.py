"""Requests to vLLM: prompts and completions within its limit."""

import pytest
import torch

from rl_vlm.errors import DataError
from rl_vlm.rollout.vllm.requests import check_length
from rl_vlm.types import Prompt, RolloutRequest, Sample, Sampling

SAMPLING = Sampling(num_generations=2, max_completion_length=3, temperature=1.0, seed=0)


def test_a_completion_that_vllm_could_cut_is_refused():
    request = RolloutRequest("g", Prompt(Sample("row-7", [], [], {}, ""), torch.tensor([1, 2]), {}, {}))
    check_length(request, SAMPLING, 5)
    message = "^Sample row-7: 2 prompt tokens and up to 3 of a completion are more than vLLM's 4. Raise "
    with pytest.raises(DataError, match=message):
        check_length(request, SAMPLING, 4)
