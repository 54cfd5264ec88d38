"""In the form of ms-swift's plugins: classes whose objects get completions as text."""

import re

from math_verify import parse, verify
from swift.plugin import ORM, orms  # type: ignore[import-not-found]


class MathAccuracy(ORM):
    """Maths in any form that the parser knows. A gold answer that is no maths gets nothing."""

    def __call__(self, completions, solution, **kwargs):
        rewards = []
        for completion, gold in zip(completions, solution, strict=True):
            expected = parse(gold, extraction_mode="first_match", parsing_timeout=0)
            found = parse(completion, extraction_mode="first_match", parsing_timeout=0)
            rewards.append(float(verify(expected, found, timeout_seconds=0)) if expected else 0.0)
        return rewards


class Format(ORM):
    def __call__(self, completions, **kwargs):
        pattern = r"^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])"
        return [1.0 if re.match(pattern, text, re.DOTALL | re.MULTILINE) else 0.0 for text in completions]


orms["mine_math"] = MathAccuracy
orms["mine_format"] = Format
