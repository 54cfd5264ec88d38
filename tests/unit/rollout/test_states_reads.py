"""A checkpoint knows the pixels of prompts that wait: another file, or other frames of it, are an error."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.frames import frames_as_images
from rl_vlm.data.sampler import Draw
from rl_vlm.data.samples import load_rows
from rl_vlm.errors import CheckpointError
from rl_vlm.rollout.states import prompt_from_state, prompt_state
from rl_vlm.types import MediumRead, Prompt, Sample
from tests.helpers.builders import Rebuilder
from tests.helpers.video_files import moving_frames, write_video

FRAMES = moving_frames(50)
DRAW = Draw(0, 0)


def prompt_of(sample: Sample) -> Prompt:
    return Prompt(sample, torch.tensor([1]), {}, {})


def read(**settings: Any) -> Sample:
    Path("train.jsonl").write_text('{"id": "a", "prompt": "?", "video": "a.mp4", "image": "a.png"}\n')
    given: dict[str, Any] = {"num_frames": 4}
    return load_rows(DataConfig(dataset_name="train.jsonl", **given | settings), "train")[0]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_video(Path("a.mp4"), FRAMES)
    Image.new("RGB", (4, 2)).save("a.png")


def restored(saved: Sample, now: Sample) -> Prompt:
    """What a resumed run makes of a prompt. No code is read from the file."""
    torch.save(prompt_state(DRAW, prompt_of(saved)), "state.pt")
    state = torch.load("state.pt", weights_only=True)
    draw, prompt = prompt_from_state(state, Rebuilder(lambda draw: prompt_of(now)))
    assert draw == DRAW
    return prompt


def test_equal_pixels_are_restored_wherever_they_are_and_whoever_reads_them():
    saved = read()
    restored(saved, read())
    Path("moved").mkdir()
    for name in ("a.mp4", "a.png"):
        Path(name).rename(f"moved/{name}")
    now = read(image_root="moved")
    assert now.videos[0].path != saved.videos[0].path
    video = replace(saved.videos[0], reader="FFmpeg 1.0")
    restored(replace(saved, videos=[video]), now)


def test_another_file_is_an_error_that_names_both():
    saved = read()
    write_video(Path("a.mp4"), FRAMES[::-1])
    now = read()
    with pytest.raises(CheckpointError, match="sample a has another video than when its completions") as error:
        restored(saved, now)
    path, pixels = Path("a.mp4").absolute(), "frames 0, 16, 33, 49 at 25 per second, total_num_frames 50, 2 s, 64 × 48"
    reader = saved.videos[0].reader
    assert reader.startswith("FFmpeg ")
    for when, sample in (("Then", saved), ("Now", now)):
        digest = sample.videos[0].digest
        assert f"{when}: {path}, {pixels} pixels, digest {digest}, read with {reader}." in str(error.value)


def test_other_frames_or_times_are_an_error():
    with pytest.raises(CheckpointError, match=r"Then: .* frames 0, 16, 33, 49 at .* frames 0, 12, 24, 37, 49 at"):
        restored(read(), read(num_frames=5))
    saved = read()
    with pytest.raises(CheckpointError, match=r"at 25 per second.* at 50 per second"):
        restored(saved, replace(saved, videos=[replace(saved.videos[0], fps=50.0)]))


def test_another_length_is_an_error():
    """The processors of some models read it. Qwen2-VL's takes frames 0, 5, 10 and 15 of 20 and of 21 frames."""
    folder = Path("frames")
    folder.mkdir()
    for number, pixels in enumerate(FRAMES[:20]):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    rows = {"id": "a", "prompt": "?", "video": "frames"}
    Path("train.jsonl").write_text(json.dumps(rows) + "\n")
    loaded = load_rows(DataConfig(dataset_name="train.jsonl", num_frames=4), "train")
    loaded = loaded.with_frames_of(transformers.Qwen2VLVideoProcessor())
    saved = loaded[0]
    Image.fromarray(FRAMES[20]).save(folder / "20.png")
    now = loaded[0]
    assert saved.videos[0].indices == now.videos[0].indices == (0, 5, 10, 15)
    assert saved.videos[0].digest == now.videos[0].digest
    with pytest.raises(CheckpointError, match=r"total_num_frames 20, 10 s.* total_num_frames 21, 10.5 s"):
        restored(saved, now)


def test_a_checkpoint_without_lengths_is_restored():
    sample = read()
    state = prompt_state(DRAW, prompt_of(sample))
    state["reads"] = [each[:7] for each in state["reads"]]
    prompt_from_state(state, Rebuilder(lambda draw: prompt_of(sample)))
    state["reads"][1] = [*state["reads"][1][:5], "another", *state["reads"][1][6:]]
    with pytest.raises(CheckpointError, match=r"Then: .* digest another"):
        prompt_from_state(state, Rebuilder(lambda draw: prompt_of(sample)))


def test_another_image_is_an_error():
    saved = read()
    Image.new("RGB", (4, 2), (1, 2, 3)).save("a.png")
    with pytest.raises(CheckpointError, match=r"another image .* Then: .*a.png, 4 × 2 pixels, digest .* with Pillow"):
        restored(saved, read())


def test_another_number_of_media_is_an_error():
    saved = read()
    with pytest.raises(CheckpointError, match=r"another video .* Now: none\."):
        restored(saved, replace(saved, videos=[]))


def test_frames_as_images_have_the_reads_of_their_video():
    sample = read()
    reads = frames_as_images(sample).reads
    assert [each.kind for each in reads] == ["image"] * 5 + ["video"]
    assert reads[-1] == sample.reads[-1]


def test_a_checkpoint_without_reads_is_restored_with_any_pixels():
    state = prompt_state(DRAW, prompt_of(read()))
    del state["reads"]
    Image.new("RGB", (4, 2), (1, 2, 3)).save("a.png")
    draw, prompt = prompt_from_state(state, Rebuilder(lambda draw: prompt_of(read())))
    assert draw == DRAW
    assert prompt.sample.images[0].getpixel((0, 0)) == (1, 2, 3)


def test_the_digest_is_of_the_pixels():
    image = Image.fromarray(np.full((2, 3, 3), 7, np.uint8))
    assert MediumRead.of_image(image, None).digest == "6a278b3aea8663a68770673cbb240c0a"  # of 18 sevens
