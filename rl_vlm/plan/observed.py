"""Images that a plan assumes in observations. Their number and size are known only during the run.

Contexts of a completion can be in several micro-batches, so a plan looks at one context.
"""

from rl_vlm.config.schema import RolloutConfig


def observed_images(rollout: RolloutConfig, image_tokens: int) -> int:
    """Return the number of images in a context after its prompt. There is one after each turn but the last, as many as
    `max_completion_length` can hold.

    Each is as large as the prompt's image, which has `image_tokens` tokens. There are none if the prompt has no image,
    or the run no tools. Edited contexts hold fewer.
    """
    if not rollout.has_tools or not image_tokens:
        return 0
    images = min(rollout.max_turns - 1, rollout.max_completion_length // image_tokens)
    return images if rollout.keep_images is None else min(images, rollout.keep_images + rollout.edit_every - 1)


def tokens_per_image(rollout: RolloutConfig, prompt_tokens: int, image_tokens: int) -> int:
    """Return the fewest tokens per image in a row: a prompt and a token, or a part of a context."""
    observed = observed_images(rollout, image_tokens)
    return min(prompt_tokens + 1, rollout.max_completion_length // observed if observed else prompt_tokens + 1)
