"""The group-shared row against one padded row per completion, on a CUDA device."""

from pathlib import Path

import pytest
import torch

from tests.integration.builders import make_group, make_policy, make_prompt, noise_image, sharp_checkpoint, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_shared_equals_dense_on_cuda(dtype: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path)
    policy = make_policy(checkpoint, dtype=dtype).to("cuda")
    groups = [
        make_group(make_prompt(checkpoint, [noise_image(32, 24, seed=1)]), [5, 1, 9, 3]),
        make_group(make_prompt(checkpoint, []), [6, 2]),
    ]
    shared = policy(whole(groups, shared=True)).logprobs_NT
    dense = policy(whole(groups, shared=False)).logprobs_NT
    assert shared.is_cuda
    assert (shared - dense).abs().max() <= tolerance
