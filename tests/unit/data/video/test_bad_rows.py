"""Three hundred rows of which forty have bad videos, and what becomes of each."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.check import UsableRows, check_rows, fitting_rows
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.samples import load_rows
from rl_vlm.distributed.ranks import Ranks
from tests.helpers.bad_videos import bad_videos, write_huge_video
from tests.helpers.builders import processor_of
from tests.helpers.video_files import moving_frames, write_video
from tests.tiny.build import build_tiny


def own_copy(value: Any, number: int) -> Any:
    """A value with a file of its own, with the same content."""
    if not isinstance(value, str) or not Path(value).exists() or Path(value).is_dir():
        return value
    path = Path(f"{number}_{value}")
    if Path(value).is_fifo():
        os.mkfifo(path)
    else:
        shutil.copy(value, path)
    return str(path)


def write_rows(num_rows: int, num_bad: int) -> tuple[dict[int, str], dict[str, str]]:
    """Write rows with every n-th one bad, a kind after the other. Returns the kind of each bad row, and the reasons."""
    kinds = bad_videos(Path())
    kinds["huge"] = (str(write_huge_video(Path("huge.mp4"))), "35200000 pixels .* data.max_image_pixels")
    good = [str(write_video(Path(f"good_{n}.mp4"), moving_frames(25 + n, 64, 48))) for n in range(8)]
    places = {num_rows // num_bad * n + 3: list(kinds)[n % len(kinds)] for n in range(num_bad)}
    videos = [own_copy(kinds[places[n]][0], n) if n in places else good[n % 8] for n in range(num_rows)]
    lines = [json.dumps({"prompt": "What moves?", "video": video}) for video in videos]
    Path("train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return places, {kind: message for kind, (_, message) in kinds.items()}


def usable_rows() -> UsableRows:
    """What a run with `max_prompt_length` uses."""
    config = DataConfig(dataset_name="train.jsonl", on_bad_row="drop", num_frames=4)
    builder = PromptBuilder(processor_of(build_tiny("qwen2_5_vl", Path("model"))), config)
    return fitting_rows(check_rows(load_rows(config, "train"), [], Ranks()), builder, 10**6)


def table(places: dict[int, str], dropped: Sequence[dict[str, Any]]) -> str:
    counts, lines = (
        Counter(places.values()),
        ["| found | rows | first row | column | reason |", "|---|---|---|---|---|"],
    )
    for kind, count in counts.items():
        first = next(record for record in dropped if places.get(record["row"]) == kind)
        _, row, rest = first["reason"].split(", ", 2)
        column, reason = rest.removeprefix("column ").split(", ", 1) if kind not in NO_PATH else rest.split(": ", 1)
        lines.append(f"| {kind} | {count} | {row.removeprefix('row ')} | {column.removeprefix('column ')} | {reason} |")
    return "\n".join(lines)


NO_PATH = ("number", "frames of unequal sizes")


@pytest.mark.slow
def test_forty_bad_videos_of_three_hundred(tmp_path, monkeypatch):

    monkeypatch.chdir(tmp_path)
    places, messages = write_rows(300, 40)
    usable = usable_rows()
    dropped = [each.record for each in usable.dropped]
    print(table(places, dropped))
    assert {record["row"] for record in dropped} == places.keys()
    for record in dropped:
        assert re.search(messages[places[record["row"]]], record["reason"])
        assert record["reason"].startswith(f"train.jsonl, row {record['row']}, column video")
    assert len(usable) == 260
    assert all(len(usable.rows[index].videos[0].indices) == 4 for index in usable.indices[::20])
