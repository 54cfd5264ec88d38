"""Rows with images, video files, both and neither."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.tiny_run import noise
from tests.helpers.video_files import moving_frames, write_video


def write_mixed_rows(path: Path) -> None:
    """Write rows of which three quarters have an image, a video file or both, and the files."""
    path.parent.mkdir()
    rows = []
    for number in range(12):
        row = {"id": f"row-{number}", "prompt": "What moves?", "solution": str(number)}
        if number % 4 in (0, 2):
            noise(number).save(path.parent / f"{number}.png")
            row["image"] = f"{number}.png"
        if number % 4 in (1, 2):
            write_video(path.parent / f"{number}.mp4", moving_frames(20 + number, 32, 32))
            row["video"] = f"{number}.mp4"
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
