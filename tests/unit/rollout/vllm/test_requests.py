"""Requests to vLLM: prompts and completions within its limit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_vlm.errors import DataError
from rl_vlm.rollout.vllm.requests import check_length, generate_requests
from rl_vlm.types import NO_TOKENS, Group, Prompt, RolloutRequest, Sample, Sampling, Video

SAMPLING = Sampling(num_generations=2, max_completion_length=3, temperature=1.0, seed=0)


def test_a_completion_that_vllm_could_cut_is_refused():
    request = RolloutRequest("g", Prompt(Sample("row-7", [], [], {}, ""), torch.tensor([1, 2]), {}, {}))
    check_length(request, SAMPLING, 5)
    message = "^Sample row-7: 2 prompt tokens and up to 3 of a completion are more than vLLM's 4. Raise "
    with pytest.raises(DataError, match=message):
        check_length(request, SAMPLING, 4)


def test_vllm_gets_the_frames_of_the_trainer_and_their_times_in_the_file():
    clip = Video(np.zeros((2, 8, 16, 3), dtype=np.uint8), (0, 5), 10.0, 20, 2.0)
    prompt = Prompt(Sample("row-7", [], [], {}, "", videos=[clip]), torch.tensor([1]), {}, {})
    (request,) = generate_requests(RolloutRequest("g", prompt), SAMPLING)
    ((frames, metadata),) = request.videos
    assert frames is clip.frames
    assert metadata == {
        "total_num_frames": 20, "fps": 10.0, "frames_indices": [0, 5], "duration": 2.0, "height": 8, "width": 16,
        "do_sample_frames": False,
    }  # fmt: skip


def test_a_completions_seed_is_the_same_alone_and_in_its_group():
    """vLLM counts up from the seed of a request: completion 1 of a group has the group's seed plus 1."""
    prompt = Prompt(Sample("s", [], [], {}, ""), torch.tensor([1, 2]), {}, {})
    (whole,) = generate_requests(RolloutRequest("g", prompt), SAMPLING)
    assert (whole.seed, whole.num_completions) == (2061693636707017642, 2)
    ended = replace(NO_TOKENS, finish_reason="stop")
    (alone,) = generate_requests(RolloutRequest("g", prompt, Group("g", prompt, [ended, NO_TOKENS], 0)), SAMPLING)
    assert (alone.seed, alone.num_completions) == (2061693636707017643, 1)
    begun = replace(NO_TOKENS, token_ids=torch.tensor([5, 6, 7]), generator_logprobs=torch.zeros(3))
    (later,) = generate_requests(RolloutRequest("g", prompt, Group("g", prompt, [ended, begun], 0)), SAMPLING)
    assert later.seed == 441522851692337801  # of "g/1/3"
