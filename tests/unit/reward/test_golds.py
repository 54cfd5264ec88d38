"""Gold answers: which column and form a function reads."""

from typing import Any

import pytest

from rl_vlm.config.schema import RewardSpec
from rl_vlm.reward.function import Reward
from rl_vlm.reward.golds import find_reading, reads_media, why_not_comparable
from rl_vlm.types import Sample


def reads_second(completions: list[str], **columns: Any) -> list[float]:
    return [float(text == gold) for text, gold in zip(completions, columns["answer text"], strict=True)]


def sees(completions: list[str], **columns: Any) -> list[float]:
    return [float(bool(times)) for times in columns["video_frame_times"]]


class Seeing:
    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [float(bool(sizes)) for sizes in columns["image_sizes"]]


@pytest.mark.parametrize(
    ("function", "expected"),
    [("reads_second", False), ("sees", True), ("Seeing", True), ("exact_match", False), ("temporal_iou", True)],
)
def test_functions_that_read_images_or_videos(function: str, expected: bool) -> None:
    name = function if function in ("exact_match", "temporal_iou") else f"{__name__}:{function}"
    assert reads_media(Reward(RewardSpec(function=name))) == expected


def test_a_column_whose_name_begins_with_another_column() -> None:
    """The form is "alone", of the second column, and not "text alone" of the first."""
    reward = Reward(RewardSpec(function=f"{__name__}:reads_second", completions="text"))
    samples = [Sample(str(i), [], [], {"answer": f"no {i % 2}", "answer text": str(i)}, "Which?") for i in range(4)]
    columns = ["answer", "answer text"]
    found = find_reading(reward, samples, columns, columns)
    assert (found.column, found.form) == ("answer text", "alone")
    assert found.answer({"answer": "no 0", "answer text": "3"}) == "3"


FRAMES = "its gold answers are numbers of frames, and answers have seconds"


@pytest.mark.parametrize(
    ("function", "settings", "reason"),
    [
        ("temporal_iou", {}, None),
        ("temporal_iou", {"solution_times": "frames"}, FRAMES),
        ("iou", {}, None),
        ("iou", {"coordinates": "original"}, None),
        ("iou", {"coordinates": "per_mille", "solution_coordinates": "per_mille"}, None),
        (
            "iou", {"coordinates": "per_mille"},
            "its gold answers have coordinates that are original, and answers per_mille",
        ),
        ("exact_match", {}, None),
    ],
)  # fmt: skip
def test_units_of_answers_and_gold_answers(function: str, settings: dict[str, str], reason: str | None) -> None:
    """Boxes of the data and of the model have the same pixels, since made-up completions resize no image."""
    assert why_not_comparable(Reward(RewardSpec(function=function, kwargs=settings))) == reason
