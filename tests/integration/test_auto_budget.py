"""`micro_batch_tokens: auto` and `rl-vlm plan`, on a tiny model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from launch import cli
from rl_vlm.data.prompts import PromptBuilder, build_prompt
from rl_vlm.data.samples import Rows
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.shardings import UNSHARDED
from rl_vlm.errors import DataError
from rl_vlm.passes.budget import PlannedBudget
from rl_vlm.passes.changes import read_changes
from rl_vlm.plan import auto
from rl_vlm.plan.bound import bytes_at_most
from rl_vlm.plan.build import plan_memory, read_config, traced_model
from rl_vlm.plan.hardware import CUDA_CONTEXT, GIB, Card, Hardware
from rl_vlm.plan.tracing.groups import PromptSize, make_prompt
from rl_vlm.run.run import Run, train
from rl_vlm.tools.instruments import INSTRUMENTS
from rl_vlm.types import Prompt
from tests.helpers.builders import sharp_checkpoint
from tests.helpers.resuming import resumed
from tests.helpers.tiers import in_tiers
from tests.helpers.tiny_run import build_checkpoint, make_config, metric_lines, weights
from tests.helpers.videos import noise_video, video_prompt
from tests.tiny.build import build_tiny

START_TOKENS = 100
NUM_STEPS = 8
SEVEN_B = "Qwen/Qwen2.5-VL-7B-Instruct"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"))


def budgets(run: Path) -> list[float]:
    return [line["memory/micro_batch_tokens"] for line in metric_lines(run)]


def test_a_small_card_gets_a_small_budget_and_the_same_weights(checkpoint: Path, tmp_path: Path, monkeypatch):
    settings = {"max_steps": 2, "beta": 0.1}
    train(make_config(checkpoint, tmp_path / "large", micro_batch_tokens="auto", **settings))
    card = Card("small", int((CUDA_CONTEXT + 30 * 2**20) / 0.95))
    monkeypatch.setattr(auto, "this_card", lambda device: card)
    train(make_config(checkpoint, tmp_path / "small", micro_batch_tokens="auto", **settings))
    large, small = budgets(tmp_path / "large"), budgets(tmp_path / "small")
    assert large == [auto.CPU_TOKENS] * 2
    assert 0 < small[0] == small[1] < auto.CPU_TOKENS
    ours, theirs = (weights(tmp_path / name / "checkpoint-2") for name in ("small", "large"))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_no_plan_takes_more_than_the_bound(family: str, tmp_path: Path):
    checkpoint = str(build_tiny(family, tmp_path / "model"))
    long_rows = {"max_completion_length": 300, "freeze_vision_tower": True}
    for settings, size in (({"beta": 0.1}, PromptSize(2**10, 8)), (long_rows, PromptSize(2**14, 256))):
        config = make_config(checkpoint, tmp_path, micro_batch_tokens=8192, **settings)
        found = read_config(config, checkpoint)
        prompt = make_prompt(found, size)
        model = traced_model(config, checkpoint, found, prompt, on_gpu=False)
        plan = plan_memory(config, Hardware(Card("CPU", 8 * GIB), 1, 1, UNSHARDED), model)
        assert plan.training.total < bytes_at_most(config, checkpoint, prompt, 8192)


@pytest.mark.parametrize("family", in_tiers(["qwen2_5_vl", "glm4v", "internvl"], (), {"glm4v"}))
def test_the_plan_of_a_video_has_its_true_size(family: str, tmp_path: Path):
    checkpoint = build_tiny(family, tmp_path / "model")
    config = make_config(str(checkpoint), tmp_path, micro_batch_tokens=8192)
    # 32 x 24 pixels are 8 x 6 patches, four of which are a token. InternVL has a tile of 4 tokens for each frame.
    expected = {"qwen2_5_vl": (48, 192), "glm4v": (48, 192), "internvl": (32, 128)}
    plans = []
    for form in ("native", "frames"):
        prompt = video_prompt(checkpoint, [noise_video(8, seed=1)], video_format=form)
        found = read_config(config, str(checkpoint))
        model = traced_model(config, str(checkpoint), found, prompt, on_gpu=False)
        assert model.prompt_tokens == len(prompt.token_ids)
        if form == "native":
            assert (model.image_tokens, model.patches) == expected[family]
        size = PromptSize(24 * 32, 10, num_frames=8, video_format=form)
        planned = traced_model(config, str(checkpoint), found, make_prompt(found, size), on_gpu=False)
        assert planned.activations.per_patch == pytest.approx(model.activations.per_patch, rel=0.05)
        plans.append(plan_memory(config, Hardware(Card("CPU", 8 * GIB), 1, 1, UNSHARDED), model))
        assert plans[-1].training.total < bytes_at_most(config, str(checkpoint), prompt, 8192)
    # a patch of a video takes the memory of a patch of an image
    prices = [plan.activations.per_patch for plan in plans]
    assert prices[0] == pytest.approx(prices[1], rel=0.05)


def test_a_model_that_surely_fits_on_a_cpu_is_not_traced(checkpoint: Path, tmp_path: Path, caplog, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the model was traced")

    monkeypatch.setattr(auto, "traced_model", refuse)
    monkeypatch.setattr(auto, "this_card", lambda device: Card("CPU", 8 * GIB))
    config = make_config(checkpoint, tmp_path / "small", micro_batch_tokens="auto")
    with caplog.at_level("INFO", "rl_vlm"):
        Run(config).close()
    assert "micro_batch_tokens 8192, the most on a CPU: the model is too small to need a plan" in caplog.text
    for name, settings in (("profiled", {"memory_profile": True}), ("vllm", {"engine": "vllm"})):
        with pytest.raises(AssertionError, match="the model was traced"):
            Run(make_config(checkpoint, tmp_path / name, micro_batch_tokens="auto", **settings))


def test_a_model_that_cannot_be_traced_trains_with_a_fixed_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Gemma 4 splits its features at places that the values of floats decide, which a trace does not know."""
    checkpoint = sharp_checkpoint("gemma4_moe", tmp_path / "model")
    train(
        make_config(checkpoint, tmp_path / "run", micro_batch_tokens="auto", max_steps=1, memory_profile=True),
        INSTRUMENTS,
    )
    assert budgets(tmp_path / "run") == [8192]
    assert 'no memory plan can be made (RuntimeError("split_with_sizes' in caplog.text


def test_the_plan_is_made_with_rows_that_can_be_built(checkpoint: Path, tmp_path: Path, caplog, monkeypatch):
    def fail_first(rows: Rows, index: int, builder: PromptBuilder) -> Prompt:
        if index < 10:
            raise DataError("the image is damaged")
        return build_prompt(rows, index, builder)

    monkeypatch.setattr("rl_vlm.run.build.build_prompt", fail_first)
    Run(make_config(checkpoint, tmp_path, micro_batch_tokens="auto")).close()
    assert "no memory plan" not in caplog.text


def test_without_a_prompt_the_budget_is_fixed(checkpoint: Path, tmp_path: Path, caplog):
    config = make_config(checkpoint, tmp_path, micro_batch_tokens="auto")
    planned, plan = auto.planned_budget(config, str(checkpoint), Ranks(), [])
    assert (planned.tokens, plan) == (8192, None)
    assert "no memory plan can be made (no row of the data makes a prompt)" in caplog.text


class Clips:
    """Shows a clip of 6 frames of 24 x 16 pixels, and of 2 frames at every other start."""

    def __init__(self) -> None:
        self.num_starts = 0

    def reset(self, **columns: Any) -> list[dict[str, Any]]:
        self.num_starts += 1
        frames = np.zeros((6 if self.num_starts % 2 else 2, 16, 24, 3), np.uint8)
        np.random.rand()
        return [{"type": "text", "text": "What moves?"}, {"type": "video", "video": frames}]

    def look(self) -> str:
        """Look."""
        return "Nothing."

    def get_reward(self) -> float:
        return 1.0


def test_the_plan_sees_clips_that_only_an_environment_shows(checkpoint: Path, tmp_path: Path, monkeypatch):
    """6 x 4 patches of 4 pixels for each of 3 pairs of frames, or for each of 6 frames that are images."""
    planned: list[tuple[int, int]] = []

    def traced(*given: Any, **settings: Any) -> Any:
        model = traced_model(*given, **settings)
        planned.append((model.image_tokens, model.patches))
        return model

    monkeypatch.setattr(auto, "traced_model", traced)
    monkeypatch.setattr(auto, "surely_fits", lambda *_: False)
    clips = {"environment": f"{__name__}:Clips", "dataset_name": "draws:20", "micro_batch_tokens": "auto"}
    for form in ("native", "frames"):
        config = make_config(checkpoint, tmp_path / form, video_format=form, **clips)
        run = Run(config)
        run.close()
        assert run.parts.budget.planned.patch_price > 0
    assert planned == [(18, 72), (36, 144)]


def test_a_plan_leaves_the_random_states(checkpoint: Path, tmp_path: Path):
    def drawn() -> Iterator[Prompt]:
        np.random.rand()
        yield from ()

    np.random.seed(0)
    auto.start_budget(make_config(checkpoint, tmp_path, micro_batch_tokens="auto"), str(checkpoint), Ranks(), drawn())
    assert np.random.rand() == 0.5488135039273248  # the first number of seed 0


class GivenMemory:
    """Says that nothing is held before a micro-batch, and the same peak in every one."""

    meaning = "given bytes"
    given_peak = 0
    most = 0

    def restart(self) -> None:
        self.most = 0

    def read(self) -> int:
        before, self.most = self.most, self.given_peak
        return before


@pytest.mark.parametrize("kept", in_tiers([2, 4], (), {2}))
def test_the_budget_is_calibrated_once(kept: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The budget of step 4 is corrected. A resumed run has that of the first run, whatever it measures itself."""
    planned = PlannedBudget(START_TOKENS, available=2**30, peak=2**30, most_tokens=10**6)
    monkeypatch.setattr("rl_vlm.run.build.start_budget", lambda *given: (planned, None))
    monkeypatch.setattr("rl_vlm.run.build.measures_budget", lambda *given: True)  # as on a GPU
    monkeypatch.setattr("rl_vlm.run.instrument.counter_of", lambda device: GivenMemory())
    monkeypatch.setattr(GivenMemory, "given_peak", 2**31)  # twice of what is available
    settings = {"prompts_per_step": 4, "max_num_seqs": 16, "micro_batch_tokens": "auto", "max_steps": NUM_STEPS}
    straight, copy = tmp_path / "straight", tmp_path / "copy"
    train(make_config(checkpoint, straight, **settings))
    (change,) = read_changes(straight)
    assert (change.step, change.reason) == (4, "calibration")
    assert START_TOKENS / 4 <= change.micro_batch_tokens <= START_TOKENS / 2
    assert budgets(straight) == [START_TOKENS] * 3 + [change.micro_batch_tokens] * (NUM_STEPS - 3)

    shutil.copytree(straight, copy)
    for step in range(kept + 1, NUM_STEPS + 1):
        shutil.rmtree(copy / f"checkpoint-{step}")
    monkeypatch.setattr(GivenMemory, "given_peak", 2**20)
    train(resumed(make_config(checkpoint, copy, **settings)))
    assert metric_lines(copy) == metric_lines(straight)
    assert read_changes(copy) == [change]
    found, expected = (weights(run / f"checkpoint-{NUM_STEPS}") for run in (copy, straight))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def write_run(path: Path, **model: object) -> str:
    run = {
        "model": {"model_name_or_path": SEVEN_B, "dtype": "bfloat16", "use_peft": True, **model},
        "data": {"dataset_name": "any", "max_pixels": 401408, "max_prompt_length": 1024},
        "rewards": {"reward_funcs": ["exact_match"]},
        "rollout": {"num_generations": 4, "max_completion_length": 512, "engine": "vllm"},
        "train": {"prompts_per_step": 8},
    }
    path.write_text(yaml.safe_dump(run))
    return str(path)


@pytest.mark.slow
def test_the_plan_of_a_7b_lora_run(tmp_path: Path, capsys):
    run = write_run(tmp_path / "run.yaml")
    picture = tmp_path / "plan.png"
    options = ["--gpus", "2", "--gpu-memory", "80GB", "--picture", str(picture)]
    assert cli.main(["plan", run, *options, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert picture.stat().st_size > 10_000
    assert plan["sharding"] == "ddp"
    assert plan["fits"]
    # The published 8.29 billion weights in bfloat16, and an adapter of rank 16 in float32.
    assert plan["phases"]["load"]["weights"] == pytest.approx(2 * 8.292e9, rel=0.02)
    rollout = plan["phases"]["generation"]
    assert rollout["vLLM"] + rollout["KV cache"] == pytest.approx(0.3 * 79.1 * GIB, rel=1e-3)
    assert plan["peak_bytes"] == max(sum(parts.values()) for parts in plan["phases"].values())
    assert plan["peak_bytes"] == sum(plan["phases"][plan["peak_phase"]].values())
    assert plan["largest_micro_batch_tokens"] > 1000


@pytest.mark.slow
def test_suggestions_begin_with_what_fits(tmp_path: Path, capsys):
    run = write_run(tmp_path / "run.yaml", use_peft=False)
    changes = ["engine=hf", "max_num_seqs=8", "ds3_gather_for_generation=false"]
    assert cli.main(["plan", run, "--gpu-memory", "24GB", "--suggest", "--json", *changes]) == 0
    setups = json.loads(capsys.readouterr().out)["setups"]
    fitting = [setup["fits"] for setup in setups]
    assert fitting == sorted(fitting, reverse=True)
    assert all(setup["peak_bytes"] < 23.6 * GIB for setup in setups if setup["fits"])
    # 8.3 billion weights with gradients and moments take 133 GB: only offloaded they fit. In 16 bits the weights take
    # 16.6 GB: without offloading, a group fits beside them only if they are in 4 bits.
    full = [setup for setup in setups if not setup["settings"].get("model.use_peft")]
    assert {setup["sharding"] for setup in full if setup["fits"]} == {"zero3_offload"}
    fitting_on_the_card = [setup for setup in setups if setup["fits"] and setup["sharding"] == "ddp"]
    assert [setup["settings"]["model.load_in_4bit"] for setup in fitting_on_the_card] == [True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu-memory", "h1000"], "h100"),
        ([], "--gpu-memory is needed, since this machine has no GPU"),
        (["--gpu-memory", "80GB", "--gpus", "0"], "--gpus"),
        (["--gpu-memory", "80GB", "--config_file", "missing.yaml"], "missing.yaml"),
    ],
)
def test_options_that_cannot_be_planned(options: list[str], message: str, tmp_path: Path, capsys):
    assert cli.main(["plan", write_run(tmp_path / "run.yaml"), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_nowhere(tmp_path: Path, capsys):
    run = write_run(tmp_path / "run.yaml", model_name_or_path=str(tmp_path / "nowhere"))
    assert cli.main(["plan", run, "--gpu-memory", "80GB"]) == 2
    assert "qwen/qwen2.5-vl-7b-instruct" in capsys.readouterr().err
