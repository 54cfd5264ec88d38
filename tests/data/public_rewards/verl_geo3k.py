"""In the form of verl's function for Geometry3K: a thought, and the answer in a LaTeX box."""

import re


def format_reward(predict_str):
    return 1.0 if re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", predict_str, re.DOTALL) else 0.0


def acc_reward(predict_str, ground_truth, use_boxed=True):
    answer = predict_str
    if use_boxed:
        boxes = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", predict_str)
        answer = boxes[-1] if boxes else "None"
    return 1.0 if answer.replace(" ", "") == ground_truth.replace(" ", "") else 0.0


def compute_score(predict_str, ground_truth, use_boxed=True, format_score=0.1):
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * right + format_score * format_reward(predict_str)
