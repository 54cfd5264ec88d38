"""Runs on images, video files and text: killed within a window, resumed, and refused if a file was replaced."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.checkpoint import store
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import CheckpointError, DataError
from rl_vlm.run.run import Run, train
from tests.helpers.resuming import assert_same_run, config_of, resumed, train_until
from tests.helpers.tiers import in_tiers
from tests.helpers.video_files import moving_frames, write_video
from tests.helpers.video_rows import write_mixed_rows


def two_runs(kind: str, checkpoint: Path, folder: Path, **settings: Any) -> tuple[Path, RunConfig, RunConfig]:
    """Write mixed rows. Return their file, and the settings of equal runs on them in `a` and `b` of the folder."""
    rows = folder / "mixed" / "train.jsonl"
    write_mixed_rows(rows)
    settings |= {"dataset_name": str(rows), "num_frames": 4, "shuffle_dataset": False, "prompts_per_step": 4}
    first, second = (config_of(kind, checkpoint, folder / name, **settings) for name in "ab")
    return rows, first, second


@pytest.mark.parametrize("num_workers", in_tiers([0, 2], fast=(), ci={0}))
def test_a_killed_run_with_videos_is_resumed(
    num_workers: int, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, straight, killed = two_runs(
        "window", tiny_checkpoint, tmp_path, max_steps=4, dataloader_num_workers=num_workers
    )
    train(straight)
    train_until(3, killed, monkeypatch)
    state = torch.load(tmp_path / "b" / "checkpoint-2" / "rank_0.pt", weights_only=True)
    groups = [group for step in state["collector"]["window"]["steps"] for group in step]
    kinds = [[read[0] for read in group["reads"]] for group in groups]
    assert kinds == [["image"], ["video"], ["image", "video"], []] * 2
    video = rows.parent / "1.mp4"
    kept = video.read_bytes()
    write_video(video, moving_frames(21, 32, 32)[::-1])
    with pytest.raises(CheckpointError, match=rf"row-1 has another video .* Then: {video}, frames 0, 5, 10, 15 at 25"):
        train(resumed(killed))
    video.write_bytes(kept)
    train(resumed(killed))
    assert_same_run(tmp_path / "b", tmp_path / "a", last=4)


@pytest.mark.parametrize("way", ["damaged", "replaced"])
def test_a_bad_video_in_mid_run_leaves_a_checkpoint_to_resume_from(
    way: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is good, so the check before the run does not find it. It is drawn in the third step."""
    rows, straight, ended = two_runs("full", tiny_checkpoint, tmp_path, max_steps=3, save_steps=0)
    train(straight)
    video = rows.parent / "9.mp4"
    kept = video.read_bytes()
    write_metrics = Run.write_metrics

    def replace_after_two(run: Run, line: dict[str, Any]) -> None:
        write_metrics(run, line)
        if line["step"] == 2:
            write_video(video, 255 - moving_frames(29, 32, 32))

    reason = "it has changed"
    with monkeypatch.context() as patch:
        if way == "replaced":
            patch.setattr(Run, "write_metrics", replace_after_two)
        else:
            third, reason = len(kept) // 3, "the file is damaged"
            video.write_bytes(kept[:third] + bytes([90]) * 200 + kept[third + 200 :])
        with pytest.raises(DataError, match=rf"train.jsonl, row 9, column video, 9.mp4: .*{reason}"):
            train(ended)
    assert store.complete(tmp_path / "b") == [tmp_path / "b" / "checkpoint-2"]
    video.write_bytes(kept)
    train(resumed(ended))
    assert_same_run(tmp_path / "b", tmp_path / "a", last=3)
