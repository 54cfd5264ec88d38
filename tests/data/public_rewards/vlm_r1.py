"""In the form of VLM-R1's: answers and gold answers in `<answer>` tags, boxes as lists or in fenced JSON."""

import json
import re

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOX = re.compile(r"\[\s*(\d+(?:\.\d+)?),\s*(\d+(?:\.\d+)?),\s*(\d+(?:\.\d+)?),\s*(\d+(?:\.\d+)?)\s*\]")
FENCE = re.compile(r"```json(.*?)```", re.DOTALL)


def overlap(one, other):
    """Intersection over union."""
    left, top = max(one[0], other[0]), max(one[1], other[1])
    right, bottom = min(one[2], other[2]), min(one[3], other[3])
    shared = max(0.0, right - left) * max(0.0, bottom - top)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return shared / (sum(areas) - shared)


def format_reward(completions, **kwargs):
    """Tags around a thought and an answer, which both may be empty."""
    pattern = r"<think>.*?</think>\s*<answer>.*?</answer>"
    return [float(re.fullmatch(pattern, c[0]["content"], re.DOTALL) is not None) for c in completions]


def iou_reward(completions, solution, **kwargs):
    """The first box in the first answer against a box as JSON in tags."""
    rewards = []
    for completion, gold in zip(completions, solution, strict=True):
        expected = json.loads(ANSWER.findall(gold)[-1])
        answer = ANSWER.search(completion[0]["content"])
        box = BOX.search(answer[1]) if answer else None
        rewards.append(float(box is not None and overlap([float(side) for side in box.groups()], expected) > 0.5))
    return rewards


def accuracy_reward(completions, solution, **kwargs):
    """The last answer, or the whole text without one, as a number or else as text in lower case."""
    rewards = []
    for completion, gold in zip(completions, solution, strict=True):
        expected, found = (clean(text) for text in (gold, completion[0]["content"]))
        try:
            rewards.append(float(float(found) == float(expected)))
        except ValueError:
            rewards.append(float(found == expected))
    return rewards


def clean(text):
    answers = ANSWER.findall(text)
    return (answers[-1] if answers else text).replace("\n", " ").strip().rstrip(".").lower()


def detection_reward(completions, solution, **kwargs):
    """The objects of fenced JSON with the right label and box, in proportion to the larger number of objects."""
    return [detected(c[0]["content"], gold) for c, gold in zip(completions, solution, strict=True)]


def detected(text, gold):
    expected = json.loads(FENCE.findall(gold)[0])
    try:
        found = json.loads(FENCE.findall(text)[0])
        hits = sum(
            any(a["label"] == b["label"] and overlap(a["bbox_2d"], b["bbox_2d"]) > 0.5 for a in found) for b in expected
        )
        return hits / max(len(found), len(expected))
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return 0.0
