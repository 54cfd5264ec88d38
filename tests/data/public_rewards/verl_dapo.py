"""In the form of verl's function for DAPO's maths: the last line `Answer: …`, 1 or -1, and what was read."""

import re


def normalized(answer):
    for word in ("$", "\\left", "\\right", " ", ","):
        answer = answer.split("=")[-1].replace(word, "")
    return answer.strip()


def compute_score(solution_str, ground_truth, extra_info=None):
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", solution_str[-300:])
    answer = normalized(found[-1] if found else "[INVALID]")
    is_right = answer == normalized(ground_truth)
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": answer}
