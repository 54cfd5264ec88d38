"""What goes wrong says where and what to do, and loses nothing that was there."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from launch import cli
from rl_vlm.algorithm.losses import TokenLoss
from rl_vlm.checkpoint import store
from rl_vlm.checkpoint.writer import CheckpointFiles
from rl_vlm.config.describe import to_yaml
from rl_vlm.errors import CheckpointError, ConfigError, DataError, RewardError, TrainingError
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.run.run import Run, train
from rl_vlm.stages import is_column, is_metric
from rl_vlm.trainer import Trainer
from tests.helpers import tiny_run
from tests.helpers.changed_losses import changed_losses
from tests.helpers.evaluating import evaluate_run
from tests.helpers.tiny_run import completions, make_config, metric_lines, noise, rows, weights


def write_images(directory: Path) -> Path:
    """A JSONL file and its images; row 7's file is cut short."""
    directory.mkdir()
    lines = []
    for i, row in enumerate(rows()):
        row["image"].save(directory / f"{i}.png")
        lines.append(json.dumps(row | {"image": f"{i}.png"}))
    (directory / "rows.jsonl").write_text("\n".join(lines))
    broken = directory / "7.png"
    broken.write_bytes(broken.read_bytes()[:200])
    return directory / "rows.jsonl"


def big_image_rows() -> list[dict[str, Any]]:
    return [row | {"image": noise(1).resize((40, 50))} if i == 3 else row for i, row in enumerate(rows())]


def rows_with_images_elsewhere() -> list[dict[str, Any]]:
    return [{"photo" if name == "image" else name: value for name, value in row.items()} for row in rows()]


def text_rows() -> list[dict[str, Any]]:
    return [row | {"image": None} for row in rows()]


def long_prompt_rows() -> list[dict[str, Any]]:
    return [row | {"prompt": row["prompt"] * 9} if i == 3 else row for i, row in enumerate(rows())]


def needs_gold(completions: list[Any], gold: list[str], **_: Any) -> list[float]:
    return [0.0 for _ in gold]


# Reward functions that fail; beside `token_sum`, which does not.


def raises(**_: Any) -> list[float]:
    raise KeyError("answer")


def returns_none(**_: Any) -> None:
    return None


def wrong_length(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * (len(completions) + 1)


def of_first(value: Any, completions: list[Any]) -> list[Any]:
    """`value` for the first completion, and 0 for the others."""
    return [value, *[0.0] * (len(completions) - 1)]


def raises_while_broken(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    """`token_sum`, which fails from the second step on while the file `broken` is there."""
    if trainer_state.global_step and Path("broken").exists():
        raise KeyError("answer")
    return tiny_run.token_sum(completion_ids)


def logs(completion_ids: list[list[int]], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
    log_extra("parsed", [len(ids) for ids in completion_ids])
    log_metric("mean_parsed", 1.0)
    return tiny_run.token_sum(completion_ids)


def reads_messages(completions: list[Any], prompts: list[Any], **_: Any) -> list[float]:
    """As VLM-R1's functions read completions; the rows of the tiny run have text."""
    assert prompts[0][-1]["content"] == "Which digit is this?"
    return [len(completion[0]["content"]) / 100 for completion in completions]


def gives_nan(completions: list[Any], **_: Any) -> list[float]:
    return of_first(float("nan"), completions)


def gives_inf(completions: list[Any], **_: Any) -> list[float]:
    return of_first(float("inf"), completions)


def gives_1e300(completions: list[Any], **_: Any) -> list[float]:
    return of_first(1e300, completions)


def gives_text(completions: list[Any], **_: Any) -> list[Any]:
    return of_first("good", completions)


calls: list[list[Any]] = []


def hangs(completions: list[Any], **_: Any) -> list[float]:
    """From the second call on, a backtracking regular expression, which holds the interpreter lock."""
    import re

    calls.append(completions)
    if len(calls) > 1:
        re.match(r"(a+)+$", "a" * 60 + "b")
    return [1.0] * len(completions)


def reward(name: str) -> str:
    return f"{__name__}:{name}"


def test_dataset_smaller_than_a_window(tiny_checkpoint, tmp_path):
    config = make_config(tiny_checkpoint, tmp_path / "run", prompts_per_step=16)
    with pytest.raises(ConfigError, match=r"12 rows.*`prompts_per_step` 12"):
        train(config)


def test_missing_column_is_found_before_the_model_is_loaded(tmp_path):
    config = make_config("no/such/model", tmp_path / "run", reward_funcs=[reward("needs_gold")])
    with pytest.raises(RewardError, match=r"'needs_gold' needs a column 'gold'.*the data has: id, solution"):
        train(config)


def test_missing_column_of_held_out_rows(tiny_checkpoint, tmp_path):
    config = make_config(
        tiny_checkpoint, tmp_path / "run", reward_funcs=[reward("needs_gold")], eval_dataset_name=tiny_run.HELD_OUT_ROWS
    )
    with pytest.raises(RewardError, match="needs a column 'gold'"):
        evaluate_run(config)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_unreadable_image_in_mid_run_leaves_a_checkpoint_to_go_on_from(num_workers, tiny_checkpoint, tmp_path):
    data = write_images(tmp_path / "data")
    settings = {"dataset_name": str(data), "shuffle_dataset": False, "save_steps": 0, "max_steps": 5}
    config = make_config(tiny_checkpoint, tmp_path / "run", **settings, dataloader_num_workers=num_workers)
    with pytest.raises(DataError, match=r"rows\.jsonl, row 7, column image, 7\.png"):
        train(config)
    assert [line["step"] for line in metric_lines(tmp_path / "run")] == [1, 2, 3]
    assert store.complete(tmp_path / "run") == [tmp_path / "run" / "checkpoint-3"]

    rows()[7]["image"].save(tmp_path / "data" / "7.png")
    train(make_config(tiny_checkpoint, tmp_path / "run", **settings, resume_from_checkpoint="auto"))
    train(make_config(tiny_checkpoint, tmp_path / "straight", **settings))
    assert metric_lines(tmp_path / "run") == metric_lines(tmp_path / "straight")
    assert completions(tmp_path / "run") == completions(tmp_path / "straight")


def test_unreadable_image_in_an_evaluation_loses_no_step(tiny_checkpoint, tmp_path):
    data = write_images(tmp_path / "data")
    config = make_config(
        tiny_checkpoint, tmp_path / "run", eval_dataset_name=str(data), eval_on_start=False, eval_steps=2, save_steps=0
    )
    with pytest.raises(DataError, match=r"rows\.jsonl, row 7"):
        train(config)
    assert [line["step"] for line in metric_lines(tmp_path / "run")] == [1, 2]
    assert store.complete(tmp_path / "run") == [tmp_path / "run" / "checkpoint-2"]


def test_image_over_the_cap(tiny_checkpoint, tmp_path):
    config = make_config(
        tiny_checkpoint, tmp_path / "run", dataset_name=reward("big_image_rows"), max_image_pixels=1000,
        prompts_per_step=12,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"row 3, column image: .*40 × 50 = 2000 pixels .*max_image_pixels = 1000"):
        train(config)
    assert not (tmp_path / "run" / "config.yaml").exists()


# The image of row 3 is resized to 40 x 48: 120 patches, which count as 160 tokens. 30 of its prompt's 49 tokens are it.


@pytest.mark.parametrize(
    ("budget", "frozen", "message", "max_pixels"),
    [
        (100, False, "160 tokens .*memory.micro_batch_tokens .*data.max_pixels to at most 1200", 1200),
        (45, True, "50 tokens, .*memory.micro_batch_tokens .*data.max_pixels to at most 1600", 1600),
    ],
)
def test_a_prompt_beyond_the_token_budget_is_an_error_at_the_start(
    budget, frozen, message, max_pixels, tiny_checkpoint, tmp_path
):
    settings = {
        "dataset_name": reward("big_image_rows"), "micro_batch_tokens": budget, "freeze_vision_tower": frozen,
        "max_steps": 2, "shuffle_dataset": False,
    }  # fmt: skip
    with pytest.raises(DataError, match=rf"row 3: Sample row-3: .*{message}\.$"):
        train(make_config(tiny_checkpoint, tmp_path / "run", **settings, on_bad_row="drop"))
    assert not (tmp_path / "run" / "config.yaml").exists()
    train(make_config(tiny_checkpoint, tmp_path / "run", **settings, max_pixels=max_pixels))


def test_a_prompt_beyond_the_token_budget_that_the_start_does_not_build_ends_the_run(
    tiny_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr("rl_vlm.run.build.NUM_LARGEST", 0)
    config = make_config(
        tiny_checkpoint, tmp_path / "run", dataset_name=reward("big_image_rows"), micro_batch_tokens=100,
        shuffle_dataset=False, save_steps=0,
    )  # fmt: skip
    with pytest.raises(DataError, match="row 3: Sample row-3: its images of 40x50 pixels count as 160 tokens"):
        train(config)
    assert store.complete(tmp_path / "run") == [tmp_path / "run" / "checkpoint-1"]


IMAGES_ELSEWHERE, TEXT_ALONE = reward("rows_with_images_elsewhere"), reward("text_rows")


@pytest.mark.parametrize(
    ("data", "message"), [(IMAGES_ELSEWHERE, r"in column photo \(row 0: pixels\)"), (TEXT_ALONE, "text_only: true")]
)
@pytest.mark.parametrize("endpoint", [None, "http://localhost:1/v1"])
def test_data_whose_images_the_model_would_not_see_is_refused_before_it_is_loaded(data, message, endpoint, tmp_path):
    if endpoint is None:
        with pytest.raises(DataError, match=message):
            train(make_config("no/such/model", tmp_path / "run", dataset_name=data))
    config = make_config("no/such/model", tmp_path / "run", eval_dataset_name=data, endpoint_url=endpoint)
    with pytest.raises(DataError, match=message):
        evaluate_run(config)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_held_out_data_whose_images_the_model_would_not_see_is_refused(tiny_checkpoint, tmp_path):
    config = make_config(tiny_checkpoint, tmp_path / "run", eval_dataset_name=IMAGES_ELSEWHERE)
    with pytest.raises(DataError, match=r"rows_with_images_elsewhere: .* in column photo"):
        train(config)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_columns_of_another_name_and_text_alone_train_if_asked_for(tiny_checkpoint, tmp_path):
    images = make_config(
        tiny_checkpoint, tmp_path / "images", dataset_name=IMAGES_ELSEWHERE, columns={"image": "photo"}, max_steps=1
    )
    straight = make_config(tiny_checkpoint, tmp_path / "straight", max_steps=1)
    train(images)
    train(straight)
    assert metric_lines(tmp_path / "images") == metric_lines(tmp_path / "straight")
    text = make_config(tiny_checkpoint, tmp_path / "text", dataset_name=TEXT_ALONE, text_only=True, max_steps=1)
    train(text)
    has_patches = ["compute/vision_patches" in metric_lines(tmp_path / name)[0] for name in ("images", "text")]
    assert has_patches == [True, False]


def test_rows_that_cannot_be_used_are_dropped_if_asked_for_and_listed(tiny_checkpoint, tmp_path, caplog):
    data = write_images(tmp_path / "data")
    (tmp_path / "data" / "7.png").write_bytes(b"no image")
    (tmp_path / "data" / "9.png").unlink()
    settings = {"dataset_name": str(data), "eval_dataset_name": str(data), "on_bad_row": "drop", "max_steps": 1}
    config = make_config(tiny_checkpoint, tmp_path / "run", prompts_per_step=10, **settings)
    train(config)
    dropped = [json.loads(line) for line in (tmp_path / "run" / "dropped_prompts.jsonl").read_text().splitlines()]
    assert [(line["sample_id"], line["row"]) for line in dropped] == [("row-7", 7), ("row-9", 9)] * 2
    assert "7.png: the image cannot be read: not an image" in dropped[0]["reason"] and "9.png" in dropped[1]["reason"]
    (trained,) = completions(tmp_path / "run").values()
    usable = {f"row-{i}" for i in range(12)} - {"row-7", "row-9"}
    assert {row["sample_id"] for row in trained} == usable
    assert "4 rows are left out" in caplog.text

    summary = evaluate_run(config)
    assert (summary["num_samples"], summary["num_dropped"]) == (10, 2)
    rows = pyarrow.parquet.read_table(tmp_path / "run" / "evaluation" / "completions.parquet").to_pylist()
    assert {row["sample_id"] for row in rows} == usable
    assert len((tmp_path / "run" / "evaluation" / "dropped_prompts.jsonl").read_text().splitlines()) == 2


def test_prompt_beyond_the_models_context_is_refused_before_it_is_sampled_from(tiny_checkpoint, tmp_path):
    """Its text is short enough to be found only when it is drawn: in step 2."""
    checkpoint_path = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    settings = json.loads((checkpoint_path / "config.json").read_text())
    settings["text_config"]["max_position_embeddings"] = 50
    (checkpoint_path / "config.json").write_text(json.dumps(settings))
    config = make_config(
        checkpoint_path, tmp_path / "run", dataset_name=reward("long_prompt_rows"), shuffle_dataset=False,
        max_completion_length=6,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"row 3: Sample row-3: its prompt has \d+ tokens, .* takes at most 44 .*=44\."):
        train(config)
    assert [line["step"] for line in metric_lines(tmp_path / "run")] == [1]


def test_long_prompt_is_dropped_and_listed_and_the_rest_trains(tiny_checkpoint, tmp_path):
    config = make_config(
        tiny_checkpoint, tmp_path / "run", dataset_name=reward("long_prompt_rows"), max_prompt_length=60,
        prompts_per_step=11, max_steps=1,
    )  # fmt: skip
    train(config)
    (dropped,) = map(json.loads, (tmp_path / "run" / "dropped_prompts.jsonl").read_text().splitlines())
    assert (dropped["sample_id"], dropped["row"], dropped["limit"]) == ("row-3", 3, 60)
    (trained,) = completions(tmp_path / "run").values()
    assert {row["sample_id"] for row in trained} == {f"row-{i}" for i in range(12)} - {"row-3"}


def test_long_held_out_prompt_is_dropped_and_listed_too(tiny_checkpoint, tmp_path):
    config = make_config(
        tiny_checkpoint, tmp_path / "run", eval_dataset_name=reward("long_prompt_rows"), max_prompt_length=60,
        max_steps=1,
    )  # fmt: skip
    train(config)
    (dropped,) = map(json.loads, (tmp_path / "run" / "dropped_prompts.jsonl").read_text().splitlines())
    assert (dropped["data"], dropped["row"], dropped["limit"]) == (reward("long_prompt_rows"), 3, 60)


@pytest.mark.parametrize(
    ("function", "kind"),
    [("gives_nan", "nan"), ("gives_inf", "inf"), ("gives_1e300", "magnitude"), ("gives_text", "type")],
)
def test_faulty_reward_is_masked_and_counted_and_the_run_goes_on(function, kind, tiny_checkpoint, tmp_path):
    config = make_config(
        tiny_checkpoint, tmp_path / "run", reward_funcs=[tiny_run.TOKEN_SUM, reward(function)], max_steps=2
    )
    summary = train(config)
    lines = metric_lines(tmp_path / "run")
    assert [line[f"reward_faults/{function}/{kind}"] for line in lines] == [1, 1]
    assert [line["skipped_updates/no_variance"] for line in lines] == [0, 0]
    assert summary["reward_faults"] == {f"{function}/{kind}": 2}
    assert summary["skipped_updates"] == {"no_variance": 0, "nonfinite": 0}
    window = completions(tmp_path / "run")["completions_00000.parquet"]
    faulted = [row for row in window if row["reward"] is None]
    assert len(faulted) == 1
    assert all(row["advantage"] == 0 and row[function] is None and row["token_sum"] is not None for row in faulted)


@pytest.mark.parametrize(
    ("function", "kind"), [("raises", "exception"), ("returns_none", "none"), ("wrong_length", "length")]
)
def test_a_run_without_a_reward_stops_with_the_fault(function, kind, tiny_checkpoint, tmp_path, capsys):
    config = make_config(tiny_checkpoint, tmp_path / "run", reward_funcs=[tiny_run.TOKEN_SUM, reward(function)])
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert cli.main(["train", str(tmp_path / "run.yaml")]) == 2
    printed = capsys.readouterr().err
    assert f"\n{function}/{kind}: r" in printed
    assert metric_lines(tmp_path / "run") == []
    assert store.complete(tmp_path / "run") == []  # there is nothing to save before the first step


def test_a_run_that_a_fault_stopped_resumes_once_it_is_mended(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken").touch()
    settings = {"reward_funcs": [reward("raises_while_broken")], "save_steps": 0, "max_steps": 3}
    with pytest.raises(
        RewardError, match=r"exception: raised KeyError: 'answer' \(test_bad_input.py:\d+ in raises_whi"
    ):
        train(make_config(tiny_checkpoint, tmp_path / "run", **settings))
    assert [line["step"] for line in metric_lines(tmp_path / "run")] == [1]
    assert store.complete(tmp_path / "run") == [tmp_path / "run" / "checkpoint-1"]

    Path("broken").unlink()
    train(make_config(tiny_checkpoint, tmp_path / "run", **settings, resume_from_checkpoint="auto"))
    train(make_config(tiny_checkpoint, tmp_path / "straight", **settings))
    assert metric_lines(tmp_path / "run") == metric_lines(tmp_path / "straight")
    assert completions(tmp_path / "run") == completions(tmp_path / "straight")


def test_a_function_for_messages_scores_rows_of_text_in_training_and_evaluation(tiny_checkpoint, tmp_path):
    config = make_config(
        tiny_checkpoint, tmp_path / "run", reward_funcs=[reward("reads_messages")], max_steps=1,
        eval_dataset_name=tiny_run.HELD_OUT_ROWS,
    )  # fmt: skip
    summary = train(config)
    assert (summary["reward_faults"], summary["eval_after"]["rewards/reads_messages/mean"] > 0) == ({}, True)
    (window,) = completions(tmp_path / "run").values()
    assert [row["reads_messages"] for row in window] == pytest.approx([len(row["completion"]) / 100 for row in window])
    assert evaluate_run(config)["rewards/reads_messages/mean"] > 0


def test_an_evaluation_without_a_reward_writes_its_files_and_is_an_error(tiny_checkpoint, tmp_path):
    settings = {"reward_funcs": [reward("raises")], "eval_dataset_name": tiny_run.HELD_OUT_ROWS}
    message = "none of the 5 completions of the evaluation has a reward, .*: raises/exception 5"
    with pytest.raises(RewardError, match=message):
        evaluate_run(make_config(tiny_checkpoint, tmp_path / "eval", **settings))
    written = sorted(path.name for path in (tmp_path / "eval" / "evaluation").iterdir())
    assert written == ["completions.parquet", "config.yaml", "images", "run.lock", "starts.jsonl", "summary.json"]
    with pytest.raises(RewardError, match=message):  # before the first step
        train(make_config(tiny_checkpoint, tmp_path / "run", **settings))


def test_every_name_that_a_run_writes_is_reserved(tiny_checkpoint, tmp_path):
    config = make_config(
        tiny_checkpoint, tmp_path / "run", reward_funcs=[reward("logs"), reward("gives_nan")], max_steps=2, beta=0.1,
        eval_dataset_name=tiny_run.HELD_OUT_ROWS, max_resampling_rounds=1, max_rollout_tokens=4, num_iterations=2,
    )  # fmt: skip
    train(config)
    metrics = {name for line in metric_lines(tmp_path / "run") for name in line} | {"time/step", "data_wait_fraction"}
    assert {name for name in metrics if not is_metric(name)} == {"mean_parsed"}
    (window,) = completions(tmp_path / "run").values()
    assert {name for name in window[0] if not is_column(name)} == {"parsed", "logs", "gives_nan"}
    evaluate_run(config)
    rows = pyarrow.parquet.read_table(tmp_path / "run" / "evaluation" / "completions.parquet").to_pylist()
    assert {name for name in rows[0] if not is_column(name)} == {"parsed", "logs", "gives_nan"}


def test_reward_that_hangs_is_killed_and_the_prompts_before_keep_their_rewards(tiny_checkpoint, tmp_path):
    """The second call of a window would take longer than any test."""
    hanging = {"function": reward("hangs"), "timeout": 10.0, "completions": "text"}
    config = make_config(tiny_checkpoint, tmp_path / "run", reward_funcs=[tiny_run.TOKEN_SUM, hanging], max_steps=1)
    train(config)
    (line,) = metric_lines(tmp_path / "run")
    assert line["reward_faults/hangs/timeout"] == 4
    assert line["rewards/hangs/mean"] == 1.0


def broken_losses(steps: set[int]) -> AbstractContextManager[None]:
    """Make the loss of these steps NaN, gradients included."""

    def broken(trainer: Trainer, loss: TokenLoss, *given: Any) -> Any:
        value_NK, flags = loss(*given)
        return (value_NK * float("nan") if trainer.progress.global_step + 1 in steps else value_NK), flags

    return changed_losses(broken)


def test_nonfinite_loss_skips_the_step_and_leaves_the_weights(tiny_checkpoint, tmp_path):
    with broken_losses(steps={2}):
        train(make_config(tiny_checkpoint, tmp_path / "run", max_steps=3))
    lines = metric_lines(tmp_path / "run")
    assert [line["skipped_updates/nonfinite"] for line in lines] == [0, 1, 0]
    first, second, third = (weights(tmp_path / "run" / f"checkpoint-{step}") for step in (1, 2, 3))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(second[name], third[name]) for name in first)
    (batch,) = torch.load(tmp_path / "run" / "nonfinite-step-2-rank-0.pt", weights_only=False)[:1]
    assert batch.group.prompt.sample.sample_id.startswith("row-")


def test_three_nonfinite_losses_in_a_row_stop_the_run_with_status_2(tiny_checkpoint, tmp_path, capsys):
    config = make_config(tiny_checkpoint, tmp_path / "run", max_steps=9, save_steps=0)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    with broken_losses(steps={2, 4, 5, 6, 7}):
        assert cli.main(["train", str(tmp_path / "run.yaml")]) == 2
    assert "3 steps in a row had a loss or gradient that is not finite" in capsys.readouterr().err
    assert [line["step"] for line in metric_lines(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert (tmp_path / "run" / "nonfinite-step-6-rank-0.pt").exists()
    assert store.complete(tmp_path / "run") == [tmp_path / "run" / "checkpoint-5"]

    with broken_losses(steps={6}), pytest.raises(TrainingError):  # the count went into the checkpoint
        train(config.model_copy(update={"train": config.train.model_copy(update={"resume_from_checkpoint": "auto"})}))
    windows = sorted(path.name for path in (tmp_path / "run" / "completions").iterdir())
    assert windows == [f"completions_{step:05d}.parquet" for step in range(6)]  # the last is pending in the checkpoint


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_while_saving_leaves_the_previous_checkpoint(tiny_checkpoint, tmp_path, monkeypatch):
    config = make_config(tiny_checkpoint, tmp_path / "run")

    save = Run.save

    def fill_disk_at_second(run: Run) -> None:
        if run.progress.global_step == 2:
            monkeypatch.setattr(CheckpointFiles, "write", no_space)
        save(run)

    monkeypatch.setattr(Run, "save", fill_disk_at_second)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 .*No space left.*complete checkpoints: checkpoint-1"):
        train(config)
    assert store.find("auto", tmp_path / "run") == tmp_path / "run" / "checkpoint-1"
    assert not list((tmp_path / "run").glob("unfinished-*"))


def test_weights_file_that_cannot_grow(tiny_checkpoint, tmp_path, monkeypatch):
    """The real error of safetensors, by a limit on the size of files."""
    config = make_config(tiny_checkpoint, tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    save = Run.save

    def limit_at_second(run: Run) -> None:
        if run.progress.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        save(run)

    monkeypatch.setattr(Run, "save", limit_at_second)
    try:
        with pytest.raises(CheckpointError, match=r"could not write checkpoint-2 .*complete checkpoints: checkpoint-1"):
            train(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.find("auto", tmp_path / "run") == tmp_path / "run" / "checkpoint-1"


def test_a_resumed_run_keeps_the_forms_of_its_rewards(tiny_checkpoint, tmp_path, monkeypatch):
    settings = {"reward_funcs": [reward("reads_messages"), tiny_run.TOKEN_SUM]}
    train(make_config(tiny_checkpoint, tmp_path / "run", max_steps=1, **settings))
    monkeypatch.setattr(RewardSuite, "find_forms", lambda *_: pytest.fail("forms are looked for again"))
    resumed = {"max_steps": 2, "resume_from_checkpoint": "auto"}
    train(make_config(tiny_checkpoint, tmp_path / "run", **settings, **resumed))
    assert all(line.get("reward_faults/reads_messages/exception") is None for line in metric_lines(tmp_path / "run"))


def test_data_that_change_the_working_directory_scatter_nothing(tiny_checkpoint, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("rows.py").write_text(
        "import os\nos.chdir('elsewhere')\nfrom tests.helpers.tiny_run import rows\n"
        "def make():\n    os.chdir('/')\n    return rows()\n"
    )
    train(make_config(tiny_checkpoint, Path("run"), max_steps=1, dataset_name="rows.py:make"))
    assert Path.cwd() == tmp_path and (tmp_path / "run" / "checkpoint-1").is_dir()
    assert list((tmp_path / "elsewhere").iterdir()) == []
