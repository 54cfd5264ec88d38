"""In the form of verl's function for GSM8K: the number after `####`, or with `flexible` the last number."""

import re


def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    text = solution_str[-300:]
    if method == "strict":
        found = re.findall(r"#### (\-?[0-9\.\,]+)", text)
        answer = found[-1].replace(",", "").replace("$", "") if found else None
    else:
        numbers = [number for number in re.findall(r"(\-?[0-9\.\,]+)", text) if number not in ("", ".")]
        answer = numbers[-1] if numbers else None
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score
