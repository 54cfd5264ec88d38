"""Runs from Python, with functions and data in memory, beside the same runs from settings that name files."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from transformers import AutoModelForImageTextToText, AutoProcessor, EarlyStoppingCallback, TrainerCallback

from rl_vlm.config.load import load_config
from rl_vlm.distributed.signals import stop
from rl_vlm.errors import CheckpointError, ConfigError, RewardError, RLVLMError
from rl_vlm.grpo_trainer import GRPOTrainer
from rl_vlm.run.run import train
from tests.helpers import tiny_run
from tests.helpers.hub_server import hub_server
from tests.helpers.tiers import in_tiers
from tests.helpers.tiny_run import make_config, metric_lines
from tests.helpers.two_processes import CPU, launch
from tests.helpers.video_files import moving_frames, write_video

NAMED = ("dataset_name", "reward_funcs")
WITHIN_WINDOW = {"gradient_accumulation_steps": 1, "steps_per_generation": 2}
SUMS = {
    97: lambda completion_ids, **_: [sum(ids) % 97 / 97 for ids in completion_ids],
    89: lambda completion_ids, **_: [sum(ids) % 89 / 89 for ids in completion_ids],
}


def trainer(checkpoint: Any, output_dir: Path, **given: Any) -> GRPOTrainer:
    """The tiny run from Python."""
    defaults = {name: value for name, value in tiny_run.DEFAULTS.items() if name not in NAMED}
    arguments = {"reward_funcs": tiny_run.token_sum, "train_dataset": tiny_run.rows(), **given}
    return GRPOTrainer(checkpoint, output_dir=output_dir, **{**defaults, **arguments})


@pytest.mark.parametrize("as_dataset", in_tiers([False, True], (), {False}), ids=["list", "Dataset"])
def test_the_run_is_that_of_the_same_function_and_rows_named_in_settings(tiny_checkpoint, tmp_path, as_dataset: bool):
    expected = train(make_config(tiny_checkpoint, tmp_path / "named", eval_dataset_name=tiny_run.HELD_OUT_ROWS))
    rows, held_out = tiny_run.rows(), tiny_run.held_out_rows()
    if as_dataset:
        rows, held_out = datasets.Dataset.from_list(rows), datasets.Dataset.from_list(held_out)
    made = trainer(tiny_checkpoint, tmp_path / "memory", train_dataset=rows, eval_dataset=held_out)
    summary = made.train()
    assert summary["optimizer_steps"] == 4
    assert summary["eval_after"] == expected["eval_after"]
    assert metric_lines(tmp_path / "memory") == metric_lines(tmp_path / "named")
    assert tiny_run.completions(tmp_path / "memory") == tiny_run.completions(tmp_path / "named")

    evaluated = made.evaluate()  # greedy, so the trained weights answer as at the end of the run
    assert evaluated["rewards/token_sum/mean"] == expected["eval_after"]["rewards/token_sum/mean"]
    start = made.evaluate(tiny_checkpoint)
    assert start["rewards/token_sum/mean"] == summary["eval_before"]["rewards/token_sum/mean"]


def test_videos_in_memory_train_like_their_files(tiny_checkpoint, tmp_path):
    rows = [{"id": str(i), "prompt": "What moves?", "video": str(tmp_path / f"{i}.mp4")} for i in range(4)]
    for number, row in enumerate(rows):
        write_video(Path(row["video"]), moving_frames(20 + number, 32, 32))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {"dataset_name": str(tmp_path / "rows.jsonl"), "num_frames": 4, "max_steps": 2}
    train(make_config(tiny_checkpoint, tmp_path / "named", **named))

    shown: list[Any] = []

    def reward(completion_ids: list[list[int]], video_duration: Any, **_: Any) -> list[float]:
        shown.extend(video_duration)
        return tiny_run.token_sum(completion_ids)

    reward.__name__ = "token_sum"
    in_memory = [row | {"video": Path(row["video"]).read_bytes()} for row in rows]
    made = trainer(
        tiny_checkpoint, tmp_path / "run", train_dataset=in_memory, reward_funcs=reward, num_frames=4, max_steps=2
    )
    made.train()
    assert metric_lines(tmp_path / "run") == metric_lines(tmp_path / "named")
    assert shown and all(seconds in {0.8, 0.84, 0.88, 0.92} for (seconds,) in shown)


def test_a_lambda_a_function_with_a_timeout_and_a_model_that_a_function_writes(tiny_checkpoint, tmp_path):

    def make_model(directory: Path, seed: int) -> None:
        tiny_run.build_checkpoint(directory)

    functions = [lambda completions, **_: [float("a" in text) for text in completions],
                 {"function": tiny_run.constant, "timeout": 60.0, "weight": 0.5}]  # fmt: skip
    made = trainer(make_model, tmp_path, reward_funcs=functions, max_steps=1)
    made.train()
    (line,) = [line for line in metric_lines(tmp_path) if line["step"] == 1]
    assert line["rewards/constant/mean"] == 0.5 and 0 <= line["rewards/<lambda>/mean"] <= 1
    with pytest.raises(RewardError, match=r"python:<lambda>#\w+"):
        train(load_config(tmp_path / "config.yaml", ["output_dir=" + str(tmp_path / "other")]))


def test_the_model_is_saved_as_an_export(tiny_checkpoint, tmp_path, monkeypatch: pytest.MonkeyPatch):
    made = trainer(tiny_checkpoint, tmp_path / "run", max_steps=1)
    made.train()
    trained = tiny_run.model_weights(tmp_path / "run" / "checkpoint-1")
    for given, written in (("run", "run/export"), ("model", "model"), ("model", "model")):  # again in its place
        assert made.save_model(tmp_path / given) == tmp_path / written
        saved = tiny_run.model_weights(tmp_path / written)
        assert saved.keys() == trained.keys() and all((saved[name] == trained[name]).all() for name in trained)
    assert "library_name: transformers" in (tmp_path / "model" / "README.md").read_text()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(ConfigError, match=r"other exists"):
        made.save_model(tmp_path / "other")
    monkeypatch.setenv("RANK", "1")
    assert made.save_model(tmp_path / "by_another") == tmp_path / "by_another"
    assert not (tmp_path / "by_another").exists()


def test_a_model_in_memory_trains_like_its_checkpoint(tiny_checkpoint, tmp_path, caplog):
    model = AutoModelForImageTextToText.from_pretrained(tiny_checkpoint)
    made = trainer(model, tmp_path / "memory", max_steps=2)
    written = f"the model in memory is written to {tmp_path / 'memory' / 'initial_model'}, and the run loads it from"
    assert written in caplog.text and "keeps its memory until you delete it" in caplog.text
    left = weakref.ref(model)
    del model
    made.train()
    assert left() is None
    trainer(tiny_checkpoint, tmp_path / "named", max_steps=2).train()
    assert metric_lines(tmp_path / "memory") == metric_lines(tmp_path / "named")
    again = AutoModelForImageTextToText.from_pretrained(tiny_checkpoint)
    trainer(again, tmp_path / "memory", max_steps=3).train(resume_from_checkpoint=True)
    with torch.no_grad():
        next(again.parameters())[0, 0] += 1
    with pytest.raises(CheckpointError, match="the initial model has changed"):
        trainer(again, tmp_path / "memory", max_steps=4).train(resume_from_checkpoint=True)


def test_a_processor_in_memory_replaces_the_checkpoint_s(tiny_checkpoint, tmp_path):
    processor: Any = AutoProcessor.from_pretrained(tiny_checkpoint)
    processor.chat_template = processor.chat_template.replace("<|im_start|>", "<|im_start|>Now ", 1)
    made = trainer(tiny_checkpoint, tmp_path, processing_class=processor, max_steps=1)
    made.train()
    initial = tmp_path / "initial_model"
    assert (initial / "model.safetensors").resolve() == (Path(tiny_checkpoint) / "model.safetensors").resolve()
    saved: Any = AutoProcessor.from_pretrained(made.save_model())
    assert saved.chat_template == processor.chat_template


class Watching(TrainerCallback):
    """Records its events with the step, and may stop the run after one."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[Any] = []
        self.stop_at = stop_at

    def note(self, event: str, state: Any, *found: Any) -> None:
        self.events.append((event, state.global_step, *found))

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("begin", state, state.max_steps, args.learning_rate, isinstance(given["model"], torch.nn.Module))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **given: Any) -> None:
        self.note("log", state, "reward" in logs, len(state.log_history))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **given: Any) -> None:
        self.note("evaluate", state, metrics["eval_num_samples"])

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("save", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        control.should_training_stop = state.global_step == self.stop_at
        self.note("step", state)
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("end", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        raise AssertionError


def test_a_callback_hears_of_events_and_stops_the_run(tiny_checkpoint, tmp_path, caplog):
    given = {"eval_dataset": tiny_run.held_out_rows(), "eval_steps": 2, "save_steps": 3, "max_steps": 5}
    watching = Watching(stop_at=2)
    made = trainer(tiny_checkpoint, tmp_path, callbacks=[watching], **given)
    assert caplog.text.count("Watching has on_epoch_end, which is not called here; the events that are: on_train") == 1
    summary = made.train()
    assert summary["optimizer_steps"] == 2 and summary["checkpoint"] == made.checkpoint
    assert made.checkpoint == str(tmp_path / "checkpoint-2")
    assert watching.events == [
        ("begin", 0, 5, 0.01, True), ("evaluate", 0, 5.0), ("log", 0, False, 1), ("log", 1, True, 2), ("step", 1),
        ("evaluate", 2, 5.0), ("log", 2, True, 3), ("step", 2), ("save", 2), ("end", 2),
    ]  # fmt: skip
    assert "the run was asked to stop, and ends after step 2 of 5" in caplog.text
    made.save_model()
    card = (tmp_path / "export" / "README.md").read_text()
    assert re.search(r"The run was ended early: .* step 2 of 5\.", card)
    trainer(tiny_checkpoint, tmp_path, **given).train(resume_from_checkpoint=True)
    assert [line["step"] for line in metric_lines(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_early_stopping_of_transformers(tiny_checkpoint, tmp_path, caplog):
    given = {"eval_dataset": tiny_run.held_out_rows(), "eval_steps": 1, "load_best_model_at_end": True}
    made = trainer(tiny_checkpoint, tmp_path, reward_funcs=tiny_run.constant, max_steps=9, **given)
    made.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    assert made.train()["optimizer_steps"] == 2  # evaluations 1 and 2 are no better than the one before training


@pytest.mark.slow
def test_the_model_is_pushed_at_the_end_of_a_run(tiny_checkpoint, tmp_path, caplog, monkeypatch: pytest.MonkeyPatch):
    hub_settings = {"push_to_hub": True, "hub_model_id": "owner/mine", "hub_token": "hf_secret"}
    made = trainer(tiny_checkpoint, tmp_path, max_steps=1, **hub_settings)
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        made.train()
        ((path, message, files),) = hub.commits
        assert (path, message) == ("/api/models/owner/mine/commit/main", "End of training")
        exported = {file.name: file.read_bytes() for file in (tmp_path / "export").iterdir()}
        assert files == exported and {"README.md", "model.safetensors", "config.json"} <= files.keys()
        assert made.push_to_hub("Again", dataset_name="owner/data") == f"{hub.url}/owner/mine"
        assert "push_to_hub ignores dataset_name: it waits, and the card is that of the export" in caplog.text
    assert "hf_secret" not in (tmp_path / "config.yaml").read_text()
    again = trainer(tiny_checkpoint, tmp_path, max_steps=2, **hub_settings)  # the hub does not answer any more
    assert again.train(resume_from_checkpoint=True)["optimizer_steps"] == 2
    assert "could not be pushed to owner/mine" in caplog.text
    with pytest.raises(CheckpointError, match="could not be pushed to owner/mine"):
        again.push_to_hub()


def test_resuming_compares_functions_and_rows(tiny_checkpoint, tmp_path, caplog):
    trainer(tiny_checkpoint, tmp_path, reward_funcs=SUMS[97], max_steps=2).train()
    caplog.clear()
    trainer(tiny_checkpoint, tmp_path, reward_funcs=SUMS[97], max_steps=3).train(resume_from_checkpoint=True)
    assert "train.max_steps 2 -> 3" in caplog.text and "rewards.reward_funcs" not in caplog.text
    caplog.set_level(logging.WARNING)
    changed = trainer(tiny_checkpoint, tmp_path, reward_funcs=SUMS[89], max_steps=4)
    assert changed.train(resume_from_checkpoint=tmp_path / "checkpoint-3")["optimizer_steps"] == 4
    assert "rewards.reward_funcs ['python:<lambda>#" in caplog.text
    with pytest.raises(CheckpointError, match=r"the training data has changed.*have changed: data\.dataset_name"):
        trainer(tiny_checkpoint, tmp_path, max_steps=5, train_dataset=tiny_run.rows()[1:]).train(True)


def test_within_a_window_another_function_is_refused(tiny_checkpoint, tmp_path):
    trainer(tiny_checkpoint, tmp_path, reward_funcs=SUMS[97], max_steps=1, **WITHIN_WINDOW).train()
    with pytest.raises(CheckpointError, match=r"`rewards\.reward_funcs` \['python:<lambda>#\w{12}'\] -> \['python:"):
        trainer(tiny_checkpoint, tmp_path, reward_funcs=SUMS[89], max_steps=2, **WITHIN_WINDOW).train(True)


def interrupt() -> None:
    """Send this process Ctrl-C, and wait until the thread that reads signals has noted it."""
    os.kill(os.getpid(), signal.SIGINT)
    while stop.signum is None:
        time.sleep(0.01)


def interrupted(function: Any, at_call: int) -> Any:
    """The function, which is interrupted at one of its calls."""
    calls = []

    def interrupted_function(**given: Any) -> list[float]:
        calls.append(None)
        if len(calls) == at_call:
            interrupt()
        return function(**given)

    return interrupted_function


def always(score: float) -> Any:
    def function(completion_ids: list[Any], **_: Any) -> list[float]:
        return [score] * len(completion_ids)

    return function


def test_an_interrupted_evaluation_is_not_resumed_with_objects_in_memory(tiny_checkpoint, tmp_path, caplog):
    rows = [{**row, "id": str(i)} for i, row in enumerate(tiny_run.held_out_rows() * 4)]
    given = {"eval_dataset": rows, "max_num_seqs": 4}
    first = {"function": interrupted(always(1.0), at_call=4), "name": "score"}
    with pytest.raises(KeyboardInterrupt):
        trainer(tiny_checkpoint, tmp_path, reward_funcs=first, **given).evaluate()
    assert len(list((tmp_path / "evaluation" / "unfinished").glob("row_*.json"))) > 0
    second = {"function": always(0.0), "name": "score"}
    assert trainer(tiny_checkpoint, tmp_path, reward_funcs=second, **given).evaluate()["rewards/score/mean"] == 0.0
    assert "which are evaluated again: functions and rows in memory may have changed since" in caplog.text


def test_after_an_interrupted_training_its_newest_checkpoint_is_evaluated(tiny_checkpoint, tmp_path):
    given = {"eval_dataset": tiny_run.held_out_rows(), "eval_on_start": False, "max_steps": 4}
    made = trainer(tiny_checkpoint, tmp_path, reward_funcs=interrupted(tiny_run.token_sum, at_call=3), **given)
    with pytest.raises(KeyboardInterrupt):
        made.train()  # in step 2, since the first call is on made-up completions
    assert made.checkpoint == str(tmp_path / "checkpoint-1")
    made.evaluate()
    assert evaluated_model(tmp_path) == str(tmp_path / "checkpoint-1")

    again = trainer(tiny_checkpoint, tmp_path, **given)
    with pytest.raises(RLVLMError, match="holds an earlier run"):
        again.train()
    assert again.checkpoint is None
    resumed = trainer(tiny_checkpoint, tmp_path, reward_funcs=interrupted(tiny_run.token_sum, at_call=2), **given)
    with pytest.raises(KeyboardInterrupt):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.checkpoint == str(tmp_path / "checkpoint-1")


def test_a_failed_training_leaves_no_checkpoint_that_is_deleted(tiny_checkpoint, tmp_path):
    broken: list[bool] = []

    def function(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if broken:
            interrupt()
        return tiny_run.token_sum(completion_ids)

    made = trainer(tiny_checkpoint, tmp_path, reward_funcs=function, max_steps=1, overwrite_output_dir=True)
    assert made.train()["checkpoint"] == made.checkpoint == str(tmp_path / "checkpoint-1")
    broken.append(True)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert made.checkpoint is None


def test_false_resumes_nothing(tiny_checkpoint, tmp_path):
    made = trainer(tiny_checkpoint, tmp_path, max_steps=1, resume_from_checkpoint=True)
    made.train()
    with pytest.raises(RLVLMError, match="holds an earlier run"):
        made.train(resume_from_checkpoint=False)


def evaluated_model(output_dir: Path) -> str:
    """The model that `evaluation/config.yaml` names."""
    return yaml.safe_load((output_dir / "evaluation" / "config.yaml").read_text())["model"]["model_name_or_path"]


UNGUARDED = """
import sys
from rl_vlm import GRPOTrainer

def mine(completions, **_):
    return [1.0] * len(completions)

print("imported as", __name__, flush=True)
rows = [{"prompt": "Which digit?"}] * 4
GRPOTrainer(
    sys.argv[1], {"function": mine, "timeout": 60.0}, None, rows, output_dir=sys.argv[2], num_generations=2,
    prompts_per_step=2, max_steps=1, text_only=True, max_completion_length=2, micro_batch_tokens=8192,
).train()
"""


def test_a_worker_does_not_run_a_script_without_a_guard(tiny_checkpoint, tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    environment = os.environ | {"PYTHONPATH": str(Path(tiny_run.__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "script.py"), str(tiny_checkpoint), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "imported as __mp_main__" in done.stdout
    assert "could not load it: a worker process imports this script" in done.stderr
    assert "rl_vlm.errors.RewardError" in done.stderr and "put the calls under" in done.stderr


SCRIPT = """
import sys
from rl_vlm import GRPOTrainer
from tests.helpers import tiny_run

if __name__ == "__main__":
    trainer = GRPOTrainer(
        sys.argv[1],
        reward_funcs=lambda completion_ids, **_: [sum(ids) % 97 / 97 for ids in completion_ids],
        train_dataset=tiny_run.rows(),
        eval_dataset=tiny_run.held_out_rows(),
        output_dir=sys.argv[2], num_generations=4, max_completion_length=6, prompts_per_step=2, max_steps=2,
        learning_rate=1e-2, disable_tqdm=True, micro_batch_tokens=8192,
    )
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
"""


def test_a_script_on_two_processes_takes_the_steps_of_one(tiny_checkpoint, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = (str(tmp_path / "script.py"), str(tiny_checkpoint), str(tmp_path / "two"))
    result = launch("--config_file", str(CPU), "--num_processes", "2", *arguments)
    assert result.returncode == 0, result.stderr
    held_out = tiny_run.held_out_rows()
    made = trainer(tiny_checkpoint, tmp_path / "one", reward_funcs=SUMS[97], eval_dataset=held_out, max_steps=2)
    made.train()
    one, two = (metric_lines(tmp_path / name) for name in ("one", "two"))
    for name in ("reward", "rewards/<lambda>/mean", "loss", "grad_norm"):
        assert [line[name] for line in two[1:]] == pytest.approx([line[name] for line in one[1:]], rel=1e-4, abs=1e-6)
    evaluated = json.loads((tmp_path / "two" / "evaluation" / "summary.json").read_text())
    assert evaluated["rewards/<lambda>/mean"] == pytest.approx(made.evaluate()["rewards/<lambda>/mean"], rel=1e-6)


@pytest.mark.slow
def test_callbacks_saving_and_pushing_on_two_processes(tiny_checkpoint, tmp_path):
    """Rank 1 alone asks to stop after step 2 of 5. As in transformers, each rank calls its callbacks."""
    program = Path(__file__).with_name("calls_on_ranks.py")
    with hub_server() as hub:
        arguments = (str(program), str(tiny_checkpoint), str(tmp_path / "run"))
        options = ("--config_file", str(CPU), "--num_processes", "2")
        result = launch(*options, *arguments, timeout=200, environment={"HF_ENDPOINT": hub.url})
    assert result.returncode == 0, result.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    events = [
        ("begin", 0), ("evaluate", 0), ("log", 0), ("log", 1), ("step", 1), ("evaluate", 2), ("log", 2), ("step", 2),
        ("save", 2), ("end", 2),
    ]  # fmt: skip
    assert first["events"] == [[*event, True] for event in events]
    assert second["events"] == [[*event, False] for event in events]
    assert [(found["steps"], found["checkpoint"], found["directory"]) for found in (first, second)] == [
        (2, str(tmp_path / "run" / "checkpoint-2"), str(tmp_path / "model"))
    ] * 2
    assert (first["address"], second["address"]) == (f"{hub.url}/owner/mine", None)
    assert [message for _, message, _ in hub.commits] == ["End of training", "By the call"]  # once each, of two ranks
    assert result.stderr.count("the run was asked to stop, and ends after step 2 of 5") == 1
    trained = tiny_run.model_weights(tmp_path / "run" / "checkpoint-2")
    for name in ("model", "of_rank_0"):
        saved = tiny_run.model_weights(tmp_path / name)
        assert saved.keys() == trained.keys() and all((saved[key] == trained[key]).all() for key in trained)
    assert first["score"] == second["score"]
