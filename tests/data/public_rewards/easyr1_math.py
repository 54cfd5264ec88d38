"""In the form of EasyR1's function for maths: one call for a batch, the answer in a LaTeX box after a thought."""

import re


def last_box(text):
    """The content of the last box, or None."""
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start + len("\\boxed"), len(text) if start >= 0 else 0):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : end]
    return None


def is_same(answer, gold):
    return answer is not None and re.sub(r"\s|\\left|\\right|\$", "", answer) == re.sub(r"\s|\$", "", gold)


def compute_score(reward_inputs, format_weight=0.1):
    if not isinstance(reward_inputs, list):
        raise ValueError("Please use `reward_type=batch`.")
    scores = []
    for given in reward_inputs:
        response = re.sub(r"\s*(<|>|/)\s*", r"\1", given["response"])
        has_format = float(re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", response, re.DOTALL) is not None)
        is_right = float(is_same(last_box(response), given["ground_truth"]))
        overall = (1 - format_weight) * is_right + format_weight * has_format
        scores.append({"overall": overall, "format": has_format, "accuracy": is_right})
    return scores
