"""Answers with boxes, and vectors in the order of numbers."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rl_vlm.tiny.boxes import BOX_TOKENS, box_answer, order_numbers, random_boxes
from rl_vlm.tiny.build import build_tiny


def test_an_answer_is_in_steps_of_fifty_thousandths():
    assert box_answer((0.1, 0.24, 0.52, 1.0)) == '{"bbox_2d": [100, 250, 500, 1000]}'


def test_random_boxes_are_squares_of_these_sides_inside_the_image():
    boxes = [json.loads(text)["bbox_2d"] for text in islice(random_boxes((0.25, 0.45), 0), 200)]
    assert {x2 - x1 for x1, _, x2, _ in boxes} <= {200, 250, 300, 350, 400, 450, 500}
    assert all(0 <= x1 < x2 <= 1000 and 0 <= y1 < y2 <= 1000 for x1, y1, x2, y2 in boxes)
    assert len({tuple(box) for box in boxes}) > 100


def test_numbers_that_are_near_have_similar_vectors(tmp_path: Path):
    build_tiny("internvl", tmp_path, hidden_size=48, whole_tokens=BOX_TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer.encode('{"bbox_2d": [100, 250, 500, 1000]}')) == 5
    order_numbers(tmp_path, seed=0)
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        at = {number: table[tokenizer.convert_tokens_to_ids(f"{number}, ")] for number in (350, 400, 900)}
        near, far = (cosine_similarity(at[350], at[other], dim=0) for other in (400, 900))
        assert near > 0.8 > 0.6 > far
