"""A run that is killed and resumed is the run that was not killed: metrics, completions and weights, bit for bit."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_vlm.checkpoint import store
from rl_vlm.checkpoint.random_states import random_states, seed_random_generators
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.errors import CheckpointError, ConfigError, ModelError, RewardError
from rl_vlm.model.loading import make_initial_model
from rl_vlm.passes.passes import Passes
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.rollout.weights import PolicyWeights
from rl_vlm.run import build as build_module
from rl_vlm.run.run import train
from rl_vlm.types import Group, RolloutRequest, Sampling
from tests.helpers import tiny_run
from tests.helpers.resuming import NUM_STEPS, VARIANTS, assert_same_run, config_of, resumed, train_until
from tests.helpers.tiers import in_tiers
from tests.helpers.tiny_run import make_config, metric_lines

CI = {"window", "lora_with_reference", "partial_rollouts", "planned_budget", "qlora"}


@pytest.mark.parametrize("variant", in_tiers(VARIANTS, (), CI))
def test_resumed_run_equals_the_run_that_was_not_killed(variant, tiny_checkpoint, tmp_path, monkeypatch):
    straight, killed = (config_of(variant, tiny_checkpoint, tmp_path / name) for name in ("straight", "killed"))
    train(straight)
    train_until(4, killed, monkeypatch)
    assert [line["step"] for line in metric_lines(tmp_path / "killed")] == [1, 2, 3, 4]
    assert store.find("auto", tmp_path / "killed") == tmp_path / "killed" / "checkpoint-3"
    train(resumed(killed))
    assert [line["step"] for line in metric_lines(tmp_path / "killed")] == list(range(1, NUM_STEPS + 1))
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


class Copy(HFEngine):
    """An engine with weights of its own, as a server has them."""

    def sync(self, source: Any, version: int) -> int:
        self.model.load_state_dict(source.policy.transformer.state_dict())
        return super().sync(source, version)


def copied_policy(config: RunConfig, _: str, weights: PolicyWeights, builder: PromptBuilder, *__: Any) -> HFEngine:
    engine = Copy.for_policy(copy.deepcopy(weights.policy), builder.processor.tokenizer, config.rollout.max_num_seqs)
    engine.policy_version = -1
    return engine


@pytest.mark.parametrize("variant", in_tiers(["full", "window", "partial_rollouts"], (), {"window"}))
def test_a_window_that_is_sampled_ahead_is_resumed_as_well(variant, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "training_engine", copied_policy)
    settings = {"engine": "vllm_server", "max_staleness": 1}
    straight, killed = (
        config_of(variant, tiny_checkpoint, tmp_path / name, **settings) for name in ("straight", "killed")
    )
    train(straight)
    lags = [line["sampling/policy_version_lag"] for line in metric_lines(tmp_path / "straight")]
    assert lags[0] == 0 and max(lags) >= {"full": 1, "window": 4, "partial_rollouts": 2}[variant]
    train_until(4, killed, monkeypatch)
    train(resumed(killed))
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eval_dataset_name": tiny_run.HELD_OUT_ROWS, "max_steps": 2}, "evaluation:0 0:0 check:0 1:0 evaluation:2"),
        ({"save_steps": 2, "max_steps": 3}, "0:0 check:0 1:0 2:2 check:2"),
    ],
)
def test_weights_are_sent_before_an_evaluation_and_after_a_checkpoint(
    settings: dict[str, Any], expected: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only at every third update. A run that is resumed from a checkpoint has no weights of before it.

    `expected` names what is generated, such as the window of a step, and the version of the engine's weights.
    """
    found: list[str] = []

    def generate(engine: Copy, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        found.append(f"{requests[0].group_id.split('/')[0]}:{engine.policy_version}")
        return HFEngine.generate(engine, requests, sampling)

    monkeypatch.setattr(Copy, "generate", generate)
    monkeypatch.setattr(build_module, "training_engine", copied_policy)
    given = {"engine": "vllm_server", "weight_sync_steps": 3, "save_steps": 3, **settings}
    train(make_config(tiny_checkpoint, tmp_path, **given))
    assert " ".join(found) == expected


def test_an_engine_sleeps_before_the_passes_and_gets_the_weights_that_it_does_not_keep(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of two updates, with an evaluation after each window, and a check after the first update."""
    calls: list[str] = []

    class Sleeper(Copy):
        is_awake = False

        def sync(self, source: Any, version: int) -> int:
            calls.append(f"sync:{version}")
            self.is_awake = True
            return super().sync(source, version)

        def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
            assert self.is_awake
            calls.append(requests[0].group_id.split("/")[0])
            return super().generate(requests, sampling)

        def sleep(self) -> bool:
            calls.extend(["sleep"] * self.is_awake)
            self.is_awake = False
            return False

    def engine(config: RunConfig, _: str, weights: PolicyWeights, builder: PromptBuilder, *__: Any) -> HFEngine:
        policy = copy.deepcopy(weights.policy)
        return Sleeper.for_policy(policy, builder.processor.tokenizer, config.rollout.max_num_seqs)

    gradients = Passes.gradients

    def noted(passes: Passes, *arguments: Any, **named: Any) -> Any:
        calls.append("train")
        return gradients(passes, *arguments, **named)

    monkeypatch.setattr(Passes, "gradients", noted)
    monkeypatch.setattr(build_module, "training_engine", engine)
    given = {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, "eval_steps": 2, "num_iterations": 2, "max_steps": 6}
    train(make_config(tiny_checkpoint, tmp_path, engine="vllm", **given))
    assert " ".join(calls) == (
        "sync:0 evaluation sleep "
        "sync:0 0 check sleep train train sync:2 evaluation sleep "
        "sync:2 2 check sleep train train sync:4 evaluation sleep "
        "sync:4 4 sleep train train sync:6 evaluation sleep"
    )


@pytest.mark.parametrize(
    "change", [{"max_rollout_tokens": None}, {"max_rollout_tokens": 1, "max_completion_length": 2}]
)
def test_settings_that_paused_completions_cannot_go_on_with_are_refused(change, tiny_checkpoint, tmp_path):
    config = config_of("partial_rollouts", tiny_checkpoint, tmp_path, max_steps=1)
    train(config)
    in_flight = torch.load(tmp_path / "checkpoint-1" / "rank_0.pt", weights_only=True)["collector"]["in_flight"]
    completions = [completion for one in in_flight for completion in one["partial"]["completions"]]
    assert {"paused", "stop"} <= {completion["finish_reason"] for completion in completions}
    rollout = config.rollout.model_copy(update=change)
    reason = r"holds paused completions of up to \d+ tokens|`rollout.max_completion_length` 24 -> 2"
    with pytest.raises(CheckpointError, match=rf"checkpoint-1 cannot be resumed(.|\n)*({reason})"):
        train(resumed(config.model_copy(update={"rollout": rollout})))


def test_the_test_would_see_a_lost_window_or_random_state(tiny_checkpoint, tmp_path, monkeypatch):
    config = config_of("window", tiny_checkpoint, tmp_path / "straight")
    train(config)
    seed_random_generators(123)
    fresh = {"window": {"collector": {"window": None}}, "random": {"random": random_states()}}
    for field, parts in fresh.items():
        killed = config_of("window", tiny_checkpoint, tmp_path / field)
        train_until(4, killed, monkeypatch)
        rank_file = tmp_path / field / "checkpoint-3" / "rank_0.pt"
        state = torch.load(rank_file, weights_only=True)
        size = rank_file.stat().st_size
        torch.save(state | {name: state[name] | part for name, part in parts.items()}, rank_file)
        amend_manifest(rank_file, size)
        train(resumed(killed))
        with pytest.raises(AssertionError):
            assert_same_run(tmp_path / field, tmp_path / "straight")


def amend_manifest(path: Path, old_size: int) -> None:
    manifest = path.parent / store.MANIFEST
    files = json.loads(manifest.read_text())
    assert files[path.name]["size"] == old_size
    entry = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps(files | {path.name: entry}))


DIES_IN_SAVE = """
import os, signal, sys
from launch import cli
from rl_vlm.checkpoint import store
from rl_vlm.checkpoint.random_states import random_states, seed_random_generators

flush, left = store.flush, int(sys.argv[2])

def flush_or_die(path):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(path)

store.flush = flush_or_die
sys.exit(cli.run("train", [sys.argv[1]]))
"""


def test_sigkill_within_a_save(tiny_checkpoint, tmp_path):
    train(config_of("window", tiny_checkpoint, tmp_path / "straight"))
    killed = config_of("window", tiny_checkpoint, tmp_path / "killed")
    (tmp_path / "killed.yaml").write_text(to_yaml(killed))
    flushes_per_save = len(list((tmp_path / "straight" / "checkpoint-1").iterdir())) + 2
    flushes = random.randint(flushes_per_save + 1, 3 * flushes_per_save)  # within the second or third save
    command = [sys.executable, "-c", DIES_IN_SAVE, str(tmp_path / "killed.yaml"), str(flushes)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert 1 <= len(store.complete(tmp_path / "killed")) <= 3
    train(resumed(killed))
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


def test_resuming_a_finished_run_changes_nothing(tiny_checkpoint, tmp_path):
    config = make_config(tiny_checkpoint, tmp_path / "run", eval_dataset_name=tiny_run.HELD_OUT_ROWS, max_steps=2)
    summary = train(config)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert train(resumed(config)) == summary
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines


def test_auto_takes_the_checkpoint_before_a_truncated_one(tiny_checkpoint, tmp_path, monkeypatch):
    train(config_of("full", tiny_checkpoint, tmp_path / "straight"))
    config = config_of("full", tiny_checkpoint, tmp_path / "killed")
    train_until(4, config, monkeypatch)
    truncated = tmp_path / "killed" / "checkpoint-3" / "model.safetensors"
    os.truncate(truncated, truncated.stat().st_size - 1)
    assert store.find("auto", tmp_path / "killed") == tmp_path / "killed" / "checkpoint-2"
    with pytest.raises(CheckpointError, match=r"checkpoint-3 .*: checkpoint-1, checkpoint-2"):
        store.find(str(truncated.parent), tmp_path / "killed")
    train(resumed(config))
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


def test_auto_without_a_checkpoint_starts_anew(tiny_checkpoint, tmp_path, monkeypatch):
    config = make_config(tiny_checkpoint, tmp_path / "run", max_steps=2)
    train_until(1, config, monkeypatch)
    train(resumed(config))
    assert [line["step"] for line in metric_lines(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize(("variant", "file"), [("full", "model.safetensors"), ("lora", "adapter_model.safetensors")])
@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_missing_or_unexpected_weights_are_refused(variant, file, change, tiny_checkpoint, tmp_path):
    config = config_of(variant, tiny_checkpoint, tmp_path / "run", max_steps=1)
    train(config)
    path = tmp_path / "run" / "checkpoint-1" / file
    tensors, size = load_file(path), path.stat().st_size
    name = next(name for name in tensors if "layers.1" in name)
    if change == "missing":
        del tensors[name]
    else:
        name = name.replace("layers.1", "layers.9")
        tensors[name] = torch.ones(1)
    save_file(tensors, path, metadata={"format": "pt"})
    amend_manifest(path, size)
    kind = {"missing": "does not have", "unexpected": "no place for"}[change]
    with pytest.raises(ModelError, match=rf"checkpoint-1 .*{kind}.* 1 tensors \(.*layers"):
        train(resumed(config))


def test_a_run_directory_in_use_is_refused_and_left_alone(tiny_checkpoint, tmp_path):
    config = make_config(tiny_checkpoint, tmp_path / "run", max_steps=1)
    train(config)
    with pytest.raises(ConfigError, match="holds an earlier run"):
        train(config)
    assert store.complete(tmp_path / "run") == [tmp_path / "run" / "checkpoint-1"]


def test_two_runs_with_one_seed_are_equal_and_another_seed_differs(tiny_checkpoint, tmp_path):
    for name, seed in (("first", 1), ("second", 1), ("other", 2)):
        train(config_of("lora", tiny_checkpoint, tmp_path / name, seed=seed, max_steps=1))
    first, second, other = (metric_lines(tmp_path / name) for name in ("first", "second", "other"))
    assert first == second != other


def test_an_earlier_run_survives_a_mistyped_setting(tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path, max_steps=2))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(RewardError):
        train(make_config(tiny_checkpoint, tmp_path, overwrite_output_dir=True, reward_funcs=["exact_mach"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_checkpoint_of_another_run_is_not_mixed_into_this_one(tiny_checkpoint, tmp_path):
    for run in ("a", "b"):
        train(make_config(tiny_checkpoint, tmp_path / run, max_steps=2))
    lines = metric_lines(tmp_path / "b")
    source = str(tmp_path / "a" / "checkpoint-2")
    with pytest.raises(ConfigError, match=f"{tmp_path / 'b'} holds another run than .*{source}"):
        train(make_config(tiny_checkpoint, tmp_path / "b", max_steps=4, resume_from_checkpoint=source))
    assert metric_lines(tmp_path / "b") == lines


def test_overwriting_deletes_the_earlier_run(tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path, max_steps=3))
    train(make_config(tiny_checkpoint, tmp_path, max_steps=1, overwrite_output_dir=True))
    assert [line["step"] for line in metric_lines(tmp_path)] == [1]
    assert [path.name for path in store.complete(tmp_path)] == ["checkpoint-1"]
    assert len(list((tmp_path / "completions").iterdir())) == 1


def test_an_initial_model_is_made_again_for_another_seed(tmp_path, caplog):
    caplog.set_level("INFO")
    made = []
    for seed in (0, 0, 1):
        make_initial_model(f"{__name__}:counted_checkpoint", seed, tmp_path / "initial_model")
        made.append((tmp_path / "initial_model" / "seed.txt").read_text())
    assert (made, CALLS) == (["0", "0", "1"], [0, 1])
    assert caplog.messages == [f"making the model {__name__}:counted_checkpoint"] * 2


def test_an_initial_model_is_made_again_if_its_file_changes(tmp_path):
    """A process loads a file once, so a link leads to another file."""
    source = "def make(directory, seed):\n    directory.mkdir()\n    (directory / 'answers.txt').write_text('{}')\n"
    for folder, answers in (("a", "1 to 6"), ("b", "1 to 9")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.py").write_text(source.format(answers))
    made = []
    for folder in ("a", "a", "b", "none"):
        (tmp_path / "task").unlink(missing_ok=True)
        (tmp_path / "task").symlink_to(tmp_path / folder)
        make_initial_model(f"{tmp_path}/task/model.py:make", 0, tmp_path / "initial_model")
        made.append((tmp_path / "initial_model/answers.txt").read_text())
    assert made == ["1 to 6", "1 to 6", "1 to 9", "1 to 9"]


CALLS: list[int] = []


def counted_checkpoint(directory: Path, seed: int) -> None:
    CALLS.append(seed)
    directory.mkdir()
    (directory / "seed.txt").write_text(str(seed))
