"""In the form of VLM-R1's script for JSON lines: the loader's column says how each answer is compared."""

# As published, without checks for None.
# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportCallIssue=false

import os
import re
from datetime import datetime


def answer_in(text):
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found.group(1).strip() if found else text.strip()


def mcq_reward(content, sol):
    letters = [re.search(r"\b([A-D])\b", answer_in(text)) for text in (content, sol)]
    return 1.0 if all(letters) and letters[0].group(1) == letters[1].group(1) else 0.0


def default_accuracy_reward(content, sol):
    return 1.0 if answer_in(content).lower() == answer_in(sol).lower() else 0.0


def accuracy_reward(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    rewards = []
    for content, sol, accu_reward_method in zip(contents, solution, kwargs.get("accu_reward_method"), strict=True):
        if accu_reward_method == "mcq":
            reward = mcq_reward(content, sol)
        elif accu_reward_method == "default":
            reward = default_accuracy_reward(content, sol)
        else:
            raise ValueError(f"there is no method {accu_reward_method}")
        rewards.append(reward)
        if os.getenv("DEBUG_MODE") == "true":
            image_path = kwargs.get("image_path")[0] if "image_path" in kwargs else None
            with open(os.getenv("LOG_PATH"), "a") as file:
                file.write(f"{datetime.now()} {reward} {image_path} {sol}\n")
    return rewards
