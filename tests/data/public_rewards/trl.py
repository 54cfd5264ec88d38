"""In the form of TRL's: conversational completions, columns as lists."""

import re

from math_verify import LatexExtractionConfig, parse, verify


def accuracy_reward(completions, solution, log_extra=None, **kwargs):
    """LaTeX with an anchor, boxes first. A gold answer that is no maths does not apply."""
    rewards = []
    for completion, gold in zip(completions, solution, strict=True):
        expected = parse(gold, parsing_timeout=0)
        if not expected:
            rewards.append(None)
            continue
        config = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
        found = parse(completion[0]["content"], [config], extraction_mode="first_match", parsing_timeout=0)
        rewards.append(float(verify(expected, found, timeout_seconds=0)))
    return rewards


def think_format_reward(completions, **kwargs):
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, text, re.DOTALL | re.MULTILINE) else 0.0 for text in texts]
