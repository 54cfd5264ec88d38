"""In the form of EasyR1's function for R1-V: one call for a completion, the answer in tags after a thought."""

import re


def compute_score(reward_input, format_weight=0.5):
    if not isinstance(reward_input, dict):
        raise ValueError("Please use `reward_type=sequential`.")
    response, gold = reward_input["response"], reward_input["ground_truth"]
    has_format = float(re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", response, re.DOTALL) is not None)
    found = re.search(r"<answer>(.*?)</answer>", response)
    is_right = float((found[1] if found else response).strip() == gold.strip())
    overall = (1 - format_weight) * is_right + format_weight * has_format
    return {"overall": overall, "format": has_format, "accuracy": is_right}
