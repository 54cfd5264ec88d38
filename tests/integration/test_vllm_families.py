"""vLLM's CPU build and the policy agree on the tiny models of these families, before and after updates."""

from importlib.util import find_spec

import pytest

from tests.helpers.tiers import in_tiers
from tests.helpers.vllm_parity import AGREE, AGREE_ON_VIDEOS, largest_gap

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")


@pytest.mark.parametrize("family", in_tiers(AGREE, fast=(), ci={"exaone4_5", "llama4"}))
def test_log_probs_are_the_policys(family: str) -> None:
    """With one, two and no images.

    EXAONE 4.5 differs by 0.3 if vLLM normalises its pixels, and Llama 4 by 0.2 if vLLM scales no queries.
    """
    assert largest_gap(family) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", AGREE_ON_VIDEOS)
def test_log_probs_of_prompts_with_videos_are_the_policys(family: str) -> None:
    """With one video, an odd number of frames, two videos, an image and a video, and a video that is long in time."""
    assert largest_gap(family, has_videos=True) <= 1e-5
