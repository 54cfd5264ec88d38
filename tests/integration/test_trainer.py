"""What settings do to a run, seen from outside: its files, its weights, and what reaches the loss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from launch import cli
from rl_vlm.algorithm.losses import Denominators
from rl_vlm.checkpoint import store
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import CheckpointError, ConfigError
from rl_vlm.evaluation.evaluator import Evaluation, Evaluator
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.model.loading import load_model
from rl_vlm.run.run import Run, train
from rl_vlm.trainer import Trainer
from rl_vlm.types import Forward, MicroBatch, SubGroup
from tests.helpers import tiny_run
from tests.helpers.changed_losses import Recorded, recorded_losses
from tests.helpers.tiny_run import completions, make_config, metric_lines, model_weights, weights

PATCHES_PER_IMAGE = 16
IN_ROLLOUTS = ("forwards", "patches")
"""What is counted where nothing is trained."""


def constant_for_odd(completion_ids: list[list[int]], solution: list[str], **_: Any) -> list[float]:
    """Without variance in half of the groups."""
    return [0.0 if int(gold) % 2 else sum(ids) % 97 / 97 for ids, gold in zip(completion_ids, solution, strict=True)]


def run(config: RunConfig) -> Trainer:
    run = Run(config)
    try:
        run.run()
    finally:
        run.close()
    return run.trainer


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, bool]:
    """By name, whether the tensors are equal."""
    assert ours.keys() == theirs.keys()
    return {name: torch.equal(ours[name], theirs[name]) for name in ours}


@pytest.fixture
def losses() -> Iterator[Recorded]:
    """What the losses of a run were given."""
    with recorded_losses() as recorded:
        yield recorded


def test_groups_without_variance_cost_no_forward_and_are_counted(tiny_checkpoint, tmp_path):
    odd = f"{__name__}:constant_for_odd"
    train(make_config(tiny_checkpoint, tmp_path, reward_funcs=[odd], prompts_per_step=12, max_steps=1))
    (line,) = metric_lines(tmp_path)
    num_odd = sum(int(row["solution"]) % 2 for row in tiny_run.rows())
    assert line["frac_reward_zero_std"] == num_odd / 12
    in_rollouts = 12
    assert line["compute/vision_patches"] == (in_rollouts + 12 - num_odd) * PATCHES_PER_IMAGE
    assert line["skipped_updates/no_variance"] == 0


def test_step_without_any_variance_makes_no_update(tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path, reward_funcs=[tiny_run.CONSTANT], weight_decay=0.1, max_steps=2))
    for line in metric_lines(tmp_path):
        assert (line["skipped_updates/no_variance"], line["frac_reward_zero_std"], line["grad_norm"]) == (1, 1, 0)
        assert {name for name in line if name.startswith("compute/")} == {f"compute/vision_{n}" for n in IN_ROLLOUTS}
    assert [line["learning_rate"] for line in metric_lines(tmp_path)] == [0.01, 0.005]
    assert all(same(weights(tmp_path / "checkpoint-2"), weights(tiny_checkpoint)).values())


def test_kl_term_needs_groups_without_variance(tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path, reward_funcs=[tiny_run.CONSTANT], beta=0.1, max_steps=1))
    (line,) = metric_lines(tmp_path)
    in_rollouts, in_reference = 2, 2
    assert line["skipped_updates/no_variance"] == 0
    assert line["compute/vision_patches"] == (in_rollouts + in_reference + 2) * PATCHES_PER_IMAGE


def script_evaluations(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    left = iter(values)
    monkeypatch.setattr(Evaluator, "run", lambda *_, **__: Evaluation({"reward": next(left)}, []))


@pytest.mark.parametrize(
    ("values", "greater", "best"),
    [([0.1, 0.2, 0.9, 0.9, 0.5], True, 2), ([0.9, 0.8, 0.1, 0.3, 0.5], False, 2), ([0.9, 0.8, 0.1, 0.3, 0.5], True, 0)],
)
def test_best_checkpoint_is_kept_and_its_weights_end_the_run(
    values, greater, best, tiny_checkpoint, tmp_path, monkeypatch
):
    script_evaluations(monkeypatch, values)
    run = Run(
        make_config(
            tiny_checkpoint, tmp_path, eval_dataset_name=tiny_run.HELD_OUT_ROWS, eval_steps=1, save_total_limit=2,
            save_steps=4, load_best_model_at_end=True, greater_is_better=greater, metric_for_best_model="eval_reward",
        )
    )  # fmt: skip
    summary = run.run()
    assert summary["eval_after"]["reward"] == values[best]
    assert summary["checkpoint"] == str(tmp_path / f"checkpoint-{best}")
    assert [path.name for path in store.complete(tmp_path)] == [f"checkpoint-{best}", "checkpoint-4"]
    stored = model_weights(tmp_path / f"checkpoint-{best}")
    assert all(same(run.trainer.policy.model.state_dict(), stored).values())
    assert not all(same(stored, model_weights(tmp_path / "checkpoint-4")).values())
    run.close()


def test_a_damaged_best_checkpoint_is_named_and_not_loaded(tiny_checkpoint, tmp_path, monkeypatch):
    script_evaluations(monkeypatch, [0.1, 0.9, 0.5])
    config = make_config(
        tiny_checkpoint, tmp_path, max_steps=2, eval_dataset_name=tiny_run.HELD_OUT_ROWS, eval_steps=1, save_steps=1,
        load_best_model_at_end=True,
    )  # fmt: skip
    finish = Run.finish

    def finish_on_a_failing_disk(self):
        file = tmp_path / "checkpoint-1" / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return finish(self)

    monkeypatch.setattr(Run, "finish", finish_on_a_failing_disk)
    with pytest.raises(CheckpointError, match=r"checkpoint-1: model.safetensors"):
        train(config)


def test_unknown_metric_for_the_best_model(tiny_checkpoint, tmp_path, monkeypatch):
    script_evaluations(monkeypatch, [0.1])
    config = make_config(
        tiny_checkpoint, tmp_path, eval_dataset_name=tiny_run.HELD_OUT_ROWS, eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="accuracy",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="metric_for_best_model accuracy is not among the metrics: reward"):
        train(config)


@pytest.mark.parametrize("steps", [1, 2])
def test_reference_moves_towards_the_policy_when_due(steps, tiny_checkpoint, tmp_path):
    trainer = run(
        make_config(
            tiny_checkpoint, tmp_path, max_steps=steps, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2,
            ref_model_mixup_alpha=0.25,
        )
    )  # fmt: skip
    initial, policy = model_weights(tiny_checkpoint), trainer.policy.model.state_dict()
    assert trainer.reference is not None and trainer.reference.frozen is not None
    reference = trainer.reference.frozen.model.state_dict()
    share = 0.25 if steps == 2 else 0.0
    for name, start in initial.items():
        assert torch.allclose(reference[name], (1 - share) * start + share * policy[name], atol=1e-6)
    assert not any(torch.equal(policy[name], initial[name]) for name in policy if "proj.weight" in name)


@pytest.mark.parametrize("quantile", [0.25, 0.5])
def test_top_entropy_quantile_trains_that_share_of_the_steps_tokens(quantile, tiny_checkpoint, tmp_path, losses):
    settings = {"top_entropy_quantile": quantile, "micro_batch_tokens": 40, "prompts_per_step": 8}
    train(make_config(tiny_checkpoint, tmp_path, **settings, max_steps=1))
    assert len(losses.inputs) > 3
    (threshold,) = {inputs.entropy_threshold for inputs in losses.inputs}
    entropies = torch.cat([inputs.entropies_NT[inputs.mask_NT] for inputs in losses.inputs])
    num_siblings = 3  # of the token at the threshold, if it is a first one: they have its entropy
    assert -1 <= int((entropies >= threshold).sum()) - quantile * len(entropies) <= 1 + num_siblings


def test_truncated_completions_can_be_left_out(tiny_checkpoint, tmp_path, losses):
    train(make_config(tiny_checkpoint, tmp_path, mask_truncated_completions=True, prompts_per_step=4, max_steps=1))
    rows = completions(tmp_path)["completions_00000.parquet"]
    whole = [row["completion_length"] for row in rows if row["finish_reason"] == "stop"]
    assert 0 < len(whole) < len(rows)
    assert sum(int(inputs.mask_NT.sum()) for inputs in losses.inputs) == sum(whole)
    assert set(losses.denominators) == {Denominators(float(sum(whole)), 16.0)}


@pytest.mark.parametrize(("built_in", "weights"), [("dapo", "token"), ("grpo", "completion"), ("dr_grpo", "budget")])
def test_a_loss_of_ones_own_trains_as_the_built_in_one_of_the_same_formula(
    built_in, weights, tiny_checkpoint, tmp_path
):
    own = {"loss_type": "rl_vlm.algorithm.losses:clipped_loss", "loss_weights": weights}
    for name, settings in (("own", own), ("built_in", {"loss_type": built_in})):
        train(make_config(tiny_checkpoint, tmp_path / name, **settings, epsilon=0.1, num_iterations=2, max_steps=2))
    assert metric_lines(tmp_path / "own") == metric_lines(tmp_path / "built_in")
    assert all(same(*(model_weights(tmp_path / name / "checkpoint-2") for name in ("own", "built_in"))).values())


def test_a_loss_of_ones_own_may_read_values_under_a_planned_budget(tiny_checkpoint, tmp_path):
    (tmp_path / "my.py").write_text(
        "def loss(ratio_NK, inputs, algorithm):\n"
        "    scale = max(1.0, ratio_NK.max().item())\n"
        "    return -ratio_NK / scale * inputs.advantages_NK, {'mine/ratio': ratio_NK}\n"
    )
    settings = {"loss_type": f"{tmp_path}/my.py:loss", "micro_batch_tokens": "auto", "max_steps": 1}
    train(make_config(tiny_checkpoint, tmp_path / "run", **settings))
    (line,) = metric_lines(tmp_path / "run")
    assert line["mine/ratio"] == pytest.approx(1.0) and line["grad_norm"] > 0


def test_a_loss_that_cannot_be_used_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "my.py").write_text("def loss(ratio_NK, inputs, algorithm):\n    return ratio_NK.mean(), {}\n")
    with pytest.raises(ConfigError, match=r"algorithm.loss_type .*my.py:loss"):
        Run(make_config("no-such-model", tmp_path / "run", loss_type=f"{tmp_path}/my.py:loss"))


@pytest.mark.parametrize("normalizer", ["step", "window"])
def test_tokens_of_the_step_or_the_windows_average_divide_the_loss(normalizer, tiny_checkpoint, tmp_path, losses):
    settings = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2}
    train(make_config(tiny_checkpoint, tmp_path, **settings, loss_normalizer=normalizer, max_steps=4))
    lengths = [row["completion_length"] for row in completions(tmp_path)["completions_00000.parquet"]]
    first, second = sum(lengths[:8]), sum(lengths[8:])  # 2 prompts × 4 completions each
    assert len(lengths) == 16 and first != second
    used = [(d.tokens, d.completions) for d in dict.fromkeys(losses.denominators)]
    assert used == ([(first, 8), (second, 8)] if normalizer == "step" else [((first + second) / 2, 8)])


def test_batch_scale_is_the_deviation_of_the_whole_window(tiny_checkpoint, tmp_path):
    settings = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "scale_rewards": "batch"}
    train(make_config(tiny_checkpoint, tmp_path, **settings, max_steps=1))
    rows = completions(tmp_path)["completions_00000.parquet"]
    rewards = torch.tensor([row["reward"] for row in rows]).view(4, 4)
    expected = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std() + 1e-4)
    torch.testing.assert_close(torch.tensor([row["advantage"] for row in rows]), expected.flatten())


def test_metrics_have_trls_names(tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path, beta=0.1, max_steps=1))
    (line,) = metric_lines(tmp_path)
    assert line.keys() >= {
        "loss", "grad_norm", "learning_rate", "epoch", "step_tokens", "reward", "reward_std", "frac_reward_zero_std",
        "rewards/token_sum/mean", "rewards/token_sum/std", "kl", "entropy", "completions/mean_length",
        "completions/min_length", "completions/max_length", "completions/clipped_ratio",
        "completions/mean_terminated_length", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
    }  # fmt: skip


def test_metrics_of_groups_are_those_of_the_completions(tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path, max_steps=1))
    (line,) = metric_lines(tmp_path)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in completions(tmp_path)["completions_00000.parquet"]:
        groups.setdefault(row["group_id"], []).append(row)
    best = [max(row["reward"] for row in rows) for rows in groups.values()]
    answers = [len({row["completion"].strip() for row in rows}) for rows in groups.values()]
    assert line["reward_best_of_group"] == pytest.approx(sum(best) / len(best))
    assert line["completions/distinct_answers"] == pytest.approx(sum(answers) / len(answers))
    assert line["frac_reward_faults"] == 0


def test_tensorboard_gets_metrics_and_settings(tiny_checkpoint, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(make_config(tiny_checkpoint, tmp_path, report_to="tensorboard", run_name="tiny", logging_steps=2))
    (events,) = (tmp_path / "tiny").glob("events.*")
    scalars = EventAccumulator(str(events)).Reload()
    assert [(event.step, event.value) for event in scalars.Scalars("reward")] == [
        (line["step"], pytest.approx(line["reward"])) for line in metric_lines(tmp_path) if line["step"] % 2 == 0
    ]


def test_tensorboard_gets_rollouts_with_images(tiny_checkpoint, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"report_to": "tensorboard", "run_name": "tiny", "logging_steps": 2, "report": True}
    train(make_config(tiny_checkpoint, tmp_path, **settings))
    (events,) = (tmp_path / "tiny").glob("events.*")
    found = EventAccumulator(str(events)).Reload()
    texts = found.Tensors("rollouts/text_summary")
    assert [event.step for event in texts] == [2, 4]  # of the windows for steps 1 and 3, which these steps train on
    (text,) = texts[0].tensor_proto.string_val
    header, _, first, *_ = text.decode().splitlines()
    names = "image | step | sample_id | prompt | completion | token_sum | reward | advantage | finish_reason"
    assert header == f"| {names} |"
    row = completions(tmp_path)["completions_00001.parquet"][0]
    assert first.startswith("| rollouts/0 | 2 | ") and len(first.split(" | ")) == 9
    assert f"| {row['sample_id']} |" in text.decode()
    assert [event.step for event in found.Images("rollouts/0")] == [2, 4]


def test_windows_of_an_earlier_run_are_not_sent(tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path, max_steps=2, save_steps=2))
    settings = {"max_steps": 4, "resume_from_checkpoint": "auto", "report_to": "tensorboard", "run_name": "tiny"}
    train(make_config(tiny_checkpoint, tmp_path, **settings, log_completions=False))
    (events,) = (tmp_path / "tiny").glob("events.*")
    assert b"rollouts" not in events.read_bytes()


def test_frozen_vision_tower_keeps_its_weights(tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path, freeze_vision_tower=True, weight_decay=0.1, max_steps=2))
    for name, equal in same(weights(tmp_path / "checkpoint-2"), weights(tiny_checkpoint)).items():
        assert equal == ("visual" in name), name


def test_lora_trains_the_adapter_alone_in_float32_on_a_bfloat16_base(tiny_checkpoint, tmp_path):
    trainer = run(make_config(tiny_checkpoint, tmp_path, use_peft=True, dtype="bfloat16", max_steps=2))
    adapter = {name: p for name, p in trainer.policy.named_parameters() if "lora" in name}
    base = {name: p for name, p in trainer.policy.named_parameters() if "lora" not in name}
    assert {(p.dtype, p.requires_grad) for p in adapter.values()} == {(torch.float32, True)}
    assert {(p.dtype, p.requires_grad) for p in base.values()} == {(torch.bfloat16, False)}
    assert not [name for name in adapter if "visual" in name]
    initial = model_weights(tiny_checkpoint)["model.language_model.embed_tokens.weight"]
    assert torch.equal(trainer.policy.transformer.get_input_embeddings().state_dict()["weight"], initial.bfloat16())
    stored = weights(tmp_path / "checkpoint-2")
    assert len(stored) == len(adapter)
    assert all(tensor.any() for tensor in stored.values())  # B starts at zero
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists()


def test_an_adapter_that_only_vllm_cannot_load_trains_with_the_hf_engine(tiny_checkpoint, tmp_path):
    settings = {"use_peft": True, "lora_target_modules": ["qkv"], "lora_exclude_modules": []}
    run(make_config(tiny_checkpoint, tmp_path, **settings, max_steps=2))
    stored = weights(tmp_path / "checkpoint-2")
    assert all("visual" in name and tensor.any() for name, tensor in stored.items())


def test_paused_completions_train_with_the_log_probs_of_their_own_versions(tiny_checkpoint, tmp_path, losses):
    settings = {"max_rollout_tokens": 2, "max_completion_length": 5, "max_steps": 4, "beta": 0.1, "num_iterations": 2}
    run(make_config(tiny_checkpoint, tmp_path, **settings))
    groups = {row["group_id"]: row for rows in completions(tmp_path).values() for row in rows}
    lengths = {row["completion_length"] for rows in completions(tmp_path).values() for row in rows}
    assert {2, 5} <= lengths  # ended within the first rollout, and at the limit
    assert len(groups) == 2 * 2  # windows of two groups, none trained on twice
    lines = metric_lines(tmp_path)
    assert lines[0]["sampling/policy_version_lag"] == 0
    assert lines[2]["sampling/policy_version_lag"] > 0  # begun two updates ago
    first, _, second, _ = losses.inputs
    for inputs, moved in ((first, False), (second, True)):
        assert inputs.generator_logprobs_NT is not None
        differences = (inputs.generator_logprobs_NT - inputs.policy_logprobs_NT.detach())[inputs.mask_NT].abs()
        assert (differences.max() > 1e-3) == moved


@pytest.mark.parametrize("setting", ["auto", "sdpa"])
def test_forwards_in_two_calls_are_counted(tiny_checkpoint, tmp_path, setting):
    train(make_config(tiny_checkpoint, tmp_path, shared_attention=setting, max_steps=1))
    (line,) = metric_lines(tmp_path)
    forwards = line["compute/shared_forwards"]
    assert forwards > 0
    assert line.get("compute/shared_forwards/two_calls", 0) == (forwards if setting == "sdpa" else 0)


def test_completions_are_printed(tiny_checkpoint, tmp_path, capsys):
    config = make_config(tiny_checkpoint, tmp_path, num_completions_to_print=3, log_completions=False, max_steps=2)
    train(config)
    printed = capsys.readouterr().out
    assert [printed.count(f"[{step}/0/row-") for step in range(3)] == [3, 3, 0]
    assert printed.count("user: <image> Which digit is this?") == 6
    assert not (tmp_path / "completions").exists()


def test_a_run_says_what_it_does(tiny_checkpoint, tmp_path, capsys):
    settings = {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, "use_peft": True, "lora_r": 4, "max_completion_length": 1}
    config = make_config(tiny_checkpoint, tmp_path / "run", **settings, max_steps=1)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    loading = [
        f"loading the training data {tiny_run.ROWS}",
        "12 rows of training data",
        f"loading the model {tiny_checkpoint} (float32, cpu)",
        "286K parameters, 8.83K of them trained",  # rank 4 × 2 layers × (4 × 96 + 3 × 240) sizes of matrices
    ]
    proven = [
        "dense rows and the same rows once more differ",
        "dense rows and the model's own forward differ",
        "shared rows and dense rows differ",
        "the run's rows and rows beside other completions differ",
        "the run's rows and rows with other images differ",
        "the run's rows and rows with the prompt of another row were not checked: there is one prompt",
        "rollouts and dense rows differ",
        "trained weights all have a gradient",
        "the first rows were checked",
    ]
    first = f"training {tiny_checkpoint} on {tiny_run.ROWS}, into {tmp_path / 'run'}"
    first = f"{first}; importing torch and transformers first"
    assert cli.main(["train", str(tmp_path / "run.yaml")]) == 0
    assert shown(capsys) == [
        first, *loading, "1 steps of 2 prompts × 4 completions, on one process", "evaluation: prompt 5/5",
        "held out, before training: token_sum …", *proven, "evaluation: prompt 5/5",
        "held out, after step 1: token_sum …", "step 1/1",
        "step 1: …% of the completions were cut off at max_completion_length",
    ]  # fmt: skip
    assert cli.main(["train", str(tmp_path / "run.yaml"), "resume_from_checkpoint=auto", "max_steps=2"]) == 0
    assert shown(capsys)[:8] == [
        first, "resumed with a changed setting: train.max_steps 1 -> 2",
        *loading, "2 steps of 2 prompts × 4 completions, on one process", "resuming from checkpoint-1 (step 1 of 2)",
    ]  # fmt: skip


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines on standard error, without figures and advice."""
    lines = re.sub(r"\d+(?=%)|(?<=token_sum )[\d.]+$", "…", capsys.readouterr().err, flags=re.MULTILINE).splitlines()
    return [re.split(r", (?:completions/s|reward|and an answer)| in (?:\d|log-probs)", line)[0] for line in lines]


def test_new_policy_is_in_train_mode(tiny_checkpoint, tmp_path):
    """Gradient checkpointing works in train mode only, also in a run resumed within a window."""
    assert Run(make_config(tiny_checkpoint, tmp_path)).trainer.policy.training


def test_dummy_micro_batch_needs_no_reference_logprobs(tiny_checkpoint, tmp_path):
    """Its completion may be one that failed, which the reference never scored."""
    run = Run(make_config(tiny_checkpoint, tmp_path, beta=0.1))
    trainer, window = run.trainer, run.collector.collect(run.progress, StepMetrics())
    dummy = MicroBatch([SubGroup(window.groups[0], [0])], shared=False, is_dummy=True)
    loss, sums = trainer.objective(window, window.groups, StepMetrics()).loss(dummy, trainer.policy(Forward(dummy)))
    assert (loss.item(), loss.requires_grad, sums) == (0.0, True, {})


def test_settings_that_the_adapter_of_a_checkpoint_does_not_have_are_refused(tiny_checkpoint, tmp_path):
    run(make_config(tiny_checkpoint, tmp_path / "first", use_peft=True, lora_r=4, max_steps=1))
    adapter = tmp_path / "first" / "checkpoint-1"
    with pytest.raises(ConfigError, match=r"model\.lora_r is 8, but the adapter .*checkpoint-1 has 4"):
        run(make_config(adapter, tmp_path / "second", use_peft=True, lora_r=8, max_steps=1))
    for unread in ({"lora_target_modules": ["k_proj"]}, {"init_lora_weights": "gaussian"}):
        (name,) = unread
        with pytest.raises(ConfigError, match=rf"model\.{name} is .*, but the adapter .* has "):
            run(make_config(adapter, tmp_path / "second", use_peft=True, lora_r=4, **unread, max_steps=1))
    model = make_config(adapter, tmp_path / "third", use_peft=True, lora_r=4).model
    loaded: Any = load_model(str(adapter), None, model)
    assert loaded.peft_config["default"].r == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_target_modules": ["qq_proj"]}, r"no module 'qq_proj' \(did you mean 'q_proj'\?\); .*down_proj"),
        ({"lora_target_modules": ["q_proj", "vv_proj"]}, r"no module 'vv_proj' \(did you mean 'v_proj'\?\)"),
        ({"lora_exclude_modules": ["visuals"]}, r"lora_exclude_modules: .*\(did you mean 'visual'\?\)"),
        ({"lora_target_modules": "q_proj"}, "model.lora_target_modules: .*'q_proj'"),
        ({"lora_target_modules": "("}, r"model.lora_target_modules '\('"),
        ({"lora_target_modules": ["norm"]}, "cannot be used: .* is not supported"),
        ({"lora_target_modules": ["q_proj"], "lora_exclude_modules": ["q_proj"]}, "cannot be used: No modules were"),
    ],
)
def test_modules_that_cannot_get_an_adapter(tiny_checkpoint, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_model(str(tiny_checkpoint), None, make_config(tiny_checkpoint, tmp_path, use_peft=True, **settings).model)


def test_a_revision_of_a_local_model_is_refused(tiny_checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"model_revision 'v2' has no effect on .*, which is not on the hub"):
        train(make_config(tiny_checkpoint, tmp_path, model_revision="v2"))


@pytest.mark.parametrize("num_iterations", [1, 2])
@pytest.mark.parametrize("use_peft", [False, True])
def test_a_frozen_vision_tower_sees_each_image_once_in_a_step(tiny_checkpoint, tmp_path, use_peft, num_iterations):
    """Rollout, reference, the pass for the entropy threshold and training share its features."""
    settings = {"freeze_vision_tower": True, "use_peft": use_peft, "beta": 0.1, "top_entropy_quantile": 0.5}
    train(make_config(tiny_checkpoint, tmp_path, **settings, num_iterations=num_iterations, max_steps=2))
    lines = metric_lines(tmp_path)
    assert [line["compute/vision_patches"] for line in lines] == [2 * PATCHES_PER_IMAGE] * 2
    assert all("compute/vision_recomputations" not in line for line in lines)
