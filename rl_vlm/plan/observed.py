"""Images that a plan assumes in observations. How many there are, and how large, is known only during the run."""

from rl_vlm.config.schema import RolloutConfig


def observed_images(rollout: RolloutConfig, image_tokens: int) -> int:
    """Return the images of a trajectory after its prompt: one after each turn but the last, as many as its tokens hold.

    Each is as large as the prompt's image, which has `image_tokens` tokens. Without that image or tools there are none.
    """
    if not rollout.has_tools or not image_tokens:
        return 0
    return min(rollout.max_turns - 1, rollout.max_completion_length // image_tokens)


def tokens_per_image(rollout: RolloutConfig, prompt_tokens: int, image_tokens: int) -> int:
    """Return the fewest tokens of rows that come with an image: a prompt and a token, or a part of a trajectory."""
    observed = observed_images(rollout, image_tokens)
    return min(prompt_tokens + 1, rollout.max_completion_length // observed if observed else prompt_tokens + 1)
