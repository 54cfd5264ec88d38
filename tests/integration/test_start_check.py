"""The check before the first step, on shared rows that are right and on shared rows with one fault each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ModelError
from rl_vlm.log.starts import read_starts
from rl_vlm.model import policy as policy_module
from rl_vlm.model.lora_linear import LoraProduct
from rl_vlm.model.policy import Policy
from rl_vlm.model.vision import VisionEncoder
from rl_vlm.passes import probing
from rl_vlm.passes.checked_groups import ALL, CheckedSize, chosen, of_other_lengths
from rl_vlm.passes.proof import AGAIN, GRADIENTS, OTHER_IMAGES, OTHER_PROMPTS, OWN_FORWARD, ROLLOUTS, SHARED, SIBLINGS
from rl_vlm.run.run import train
from rl_vlm.tools.checks.smoke import short_settings
from rl_vlm.trainer import Trainer
from rl_vlm.types import Forward, MicroBatch, PolicyOutput, ScoredGroup
from tests.helpers.builders import make_groups, make_policy, noise_image, sharp_checkpoint
from tests.helpers.family_parity import DENSE_ALONE
from tests.helpers.flex_on_cpu import (
    Attend,
    groups_of_heads_swapped,
    half_of_key_gradients,
    mask_off_by_a_block,
    rotary_in_bfloat16,
    scale_left_out,
    soft_cap_dropped,
    use_flex_attention,
)
from tests.helpers.given_groups import make_trainer
from tests.helpers.sharded_runs import Runs, differences
from tests.helpers.tiers import FEW_FAMILIES, families_in_tiers, in_tiers
from tests.helpers.tiny_run import make_config
from tests.tiny.build import TINY_FAMILIES

FAULTS: dict[Callable[[Attend], Attend], str] = {
    mask_off_by_a_block: "qwen2_5_vl",
    scale_left_out: "qwen2_5_vl",
    groups_of_heads_swapped: "gemma3",  # which has two key heads
    rotary_in_bfloat16: "qwen2_5_vl",
    soft_cap_dropped: "paligemma2",
}
"""Faults, each with a family that it concerns."""

SHOW_IN_BFLOAT16 = [mask_off_by_a_block, scale_left_out, groups_of_heads_swapped]
"""Faults whose effect is above rounding to bfloat16, in tiny models."""


def trainer_of(checkpoint: Path, **settings: Any) -> tuple[Trainer, list[ScoredGroup]]:
    """With `sharing`, the way of `memory.prefix_sharing`; the other settings are the model's."""
    groups = make_groups(
        checkpoint, [([noise_image(64, 48, seed=1)], [200, 31, 90]), ([noise_image(32, 24, seed=2)], [17, 40])]
    )
    sharing = settings.pop("sharing", "auto")
    return make_trainer(make_policy(checkpoint, **settings), groups, prefix_sharing=sharing), groups


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", families_in_tiers(TINY_FAMILIES, FEW_FAMILIES))
def test_right_rows_pass(tmp_path: Path, family: str, dtype: str) -> None:
    trainer, groups = trainer_of(sharp_checkpoint(family, tmp_path), dtype=dtype)
    proof = trainer.start_check.run(groups)
    print(family, dtype, *proof.checks, sep="\n")
    shared = [] if family in DENSE_ALONE else [SHARED]
    assert [check.of for check in proof.checks] == [
        AGAIN, OWN_FORWARD, *shared, SIBLINGS, OTHER_IMAGES, OTHER_PROMPTS, ROLLOUTS, GRADIENTS,
    ]  # fmt: skip
    assert [check.of for check in proof.checks if check.untried] == [ROLLOUTS]  # they were not sampled
    assert all(check.holds for check in proof.checks) and proof.fallback is None
    assert not trainer.start_check.is_due and trainer.passes.sharing == ("auto" if shared else "dense")
    assert all(parameter.grad is None for parameter in trainer.policy.parameters())
    assert not any(group.old_logprobs for group in groups)


@pytest.mark.parametrize("sharding", in_tiers(["ddp", "zero2", "zero3", "fsdp2"], (), {"ddp"}))
def test_a_fault_of_one_rank_ends_all(tiny_checkpoint: Path, tmp_path: Path, sharding: str) -> None:
    settings = {"checkpoint": tiny_checkpoint, "max_steps": 1, "prefix_sharing": "shared"}
    runs = Runs.of(tmp_path, {"wrong-rows": settings}).launch(sharding)
    log = (runs.directory / "log").read_text()
    for rank in range(2):
        assert f"[rank{rank}]: rl_vlm.errors.ModelError: Shared rows and dense rows differ on this CPU in" in log


@pytest.mark.parametrize("sharding", in_tiers(["zero3", "fsdp2"], (), {"zero3"}))
def test_ranks_gather_all_weights_for_most_checks(tiny_checkpoint: Path, tmp_path: Path, sharding: str) -> None:
    """Training goes on as on one process. Weights that generation must not gather are not gathered here either."""
    settings = {"checkpoint": tiny_checkpoint, "max_steps": 2, "save_steps": 1, "prefix_sharing": "auto"}
    apart = {**settings, "ds3_gather_for_generation": False}
    runs = Runs.of(tmp_path / "two", {"whole": settings, "apart": apart}).launch(sharding)
    results = {name: read_starts(runs[name])[0]["proof"]["checks"] for name in ("whole", "apart")}
    assert [(check["check"].split(" differ")[0], check["result"]) for check in results["whole"]] == [
        (SHARED, "holds"), (AGAIN, "holds"), (OWN_FORWARD, "holds"), (SIBLINGS, "holds"), (OTHER_IMAGES, "holds"),
        (OTHER_PROMPTS, "holds"), (ROLLOUTS, "holds"),
        ("trained weights were not checked: they are sharded between ranks", "untried"),
    ]  # fmt: skip
    assert [check["result"] for check in results["apart"]] == ["holds", "untried"]
    assert "ds3_gather_for_generation is false" in results["apart"][1]["check"]
    one = Runs.of(tmp_path / "one", {"whole": settings}).train()
    found = differences(one["whole"], runs["whole"])
    print(sharding, found)
    assert found.losses <= 1e-5 and found.norms <= 1e-4 and found.gradients <= 1e-5 and found.weights <= 1e-3


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [*((fault, "float32") for fault in FAULTS), *((fault, "bfloat16") for fault in SHOW_IN_BFLOAT16)],
)
def test_a_fault_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Attend], Attend], dtype: str
) -> None:
    trainer, groups = trainer_of(sharp_checkpoint(FAULTS[fault], tmp_path), dtype=dtype, sharing="shared")
    use_flex_attention(monkeypatch, fault)
    with pytest.raises(ModelError, match=r"differ on this CPU in .*shared_attention: sdpa") as raised:
        trainer.start_check.run(groups)
    print(fault.__name__, dtype, raised.value)


def test_logits_that_are_not_the_models_own_end_the_run(tmp_path: Path) -> None:
    """Granite divides logits by a number. Its model alone does so, and LLaVA-NeXT over Granite does not."""
    checkpoint = sharp_checkpoint("llava_next", tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"] |= {"model_type": "granite", "logits_scaling": 2.0}
    (checkpoint / "config.json").write_text(json.dumps(config))
    trainer, groups = trainer_of(checkpoint)
    with pytest.raises(ModelError, match="own forward differ on this CPU in log-probs by"):
        trainer.start_check.run(groups)


@pytest.fixture
def is_shared(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether the last forward had shared rows."""
    made: list[str] = []
    for name in ("shared_inputs", "dense_inputs"):
        function = getattr(policy_module, name)
        monkeypatch.setattr(
            policy_module, name, lambda *args, name=name, function=function: made.append(name) or function(*args)
        )
    return lambda: made[-1] == "shared_inputs"


def test_gradients_of_another_direction_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: Callable[[], bool]
) -> None:
    """All gradients of shared rows are negated, so that their norms are right."""
    trainer, groups = trainer_of(sharp_checkpoint("qwen2_5_vl", tmp_path), sharing="shared")
    hidden = Policy.output_of_rows

    def negated(policy: Policy, batch: MicroBatch) -> Tensor:
        output = hidden(policy, batch)
        return 2 * output.detach() - output if is_shared() else output

    monkeypatch.setattr(Policy, "output_of_rows", negated)
    with pytest.raises(ModelError, match=r"differ on this CPU in the gradient of \S+ by 2\.0e\+00"):
        trainer.start_check.run(groups)


@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
def test_wrong_gradients_of_an_adapter_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: Callable[[], bool], factor: str
) -> None:
    """All other gradients of shared rows are right."""
    trainer, groups = trainer_of(sharp_checkpoint("qwen2_5_vl", tmp_path), sharing="shared", use_peft=True)
    at, backward = {"lora_A": 3, "lora_B": 4}[factor], LoraProduct.backward

    def wrong(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = list(backward(ctx, *gradients))
        if is_shared() and found[at] is not None:
            found[at] = torch.as_tensor(found[at]).flip(0)
        return tuple(found)

    monkeypatch.setattr(LoraProduct, "backward", staticmethod(wrong))
    with pytest.raises(ModelError, match=rf"differ on this CPU in the gradient of \S+{factor}\S+ by") as raised:
        trainer.start_check.run(groups)
    assert "log-prob" not in str(raised.value).split(". Each bound")[0]


def test_a_wrong_gradient_of_a_weight_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: Callable[[], bool]
) -> None:
    """The queries of the first layer, in shared rows alone."""
    trainer, groups = trainer_of(sharp_checkpoint("qwen2_5_vl", tmp_path), sharing="shared")
    layer: Any = trainer.policy.transformer.model.language_model.layers[0].self_attn.q_proj

    def forward(x: Tensor) -> Tensor:
        weight = 2 * layer.weight.detach() - layer.weight if is_shared() else layer.weight
        return torch.nn.functional.linear(x, weight, layer.bias)

    monkeypatch.setattr(layer, "forward", forward)
    with pytest.raises(
        ModelError, match=r"in the gradient of model\.language_model\.layers\.0\.self_attn\.q_proj\.weight"
    ):
        trainer.start_check.run(groups)


def test_a_wrong_first_token_ends_the_run_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all tokens the difference is small."""
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path)
    groups = make_groups(checkpoint, [([noise_image(64, 48, seed=1)], [128, 128, 128])])
    trainer = make_trainer(make_policy(checkpoint, dtype="bfloat16"), groups, prefix_sharing="shared")
    score = Policy.score

    def wrong(policy: Policy, work: Forward) -> PolicyOutput:
        output = score(policy, work)
        if not work.batch.shared:
            return output
        first = torch.nn.functional.one_hot(torch.tensor(0), output.logprobs_NT.shape[1])
        return output._replace(logprobs_NT=output.logprobs_NT + 0.5 * first)

    monkeypatch.setattr(Policy, "score", wrong)
    with pytest.raises(ModelError, match="rows differ on this CPU in the worst log-prob by"):
        trainer.start_check.run(groups)


def test_wrong_gradients_of_right_rows_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, groups = trainer_of(sharp_checkpoint("qwen2_5_vl", tmp_path), sharing="shared")
    use_flex_attention(monkeypatch, half_of_key_gradients)
    with pytest.raises(ModelError, match="differ on this CPU in the gradient of"):
        trainer.start_check.run(groups)


def test_a_run_goes_on_with_dense_rows_if_sharing_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, groups = trainer_of(sharp_checkpoint("qwen2_5_vl", tmp_path))
    use_flex_attention(monkeypatch, mask_off_by_a_block)
    proof = trainer.start_check.run(groups)
    assert proof.fallback == "dense rows" and proof.state()["fallback"] == "dense rows"
    assert "on this CPU. The run goes on with dense rows, which is slower" in caplog.text
    rounds = trainer.passes.schedule(groups, groups[0], trainer.policy.vision, together=False)
    assert {(work.forward.batch.shared, work.forward.batch.dense_reason) for work in rounds} == {(False, "not_proven")}


def test_other_log_probs_of_rollouts_end_the_run(tmp_path: Path) -> None:
    trainer, groups = trainer_of(sharp_checkpoint("qwen2_5_vl", tmp_path))
    version = groups[0].group.policy_version
    with pytest.raises(ModelError, match="Rollouts and dense rows differ on this CPU in log-probs by"):
        trainer.start_check.run(groups, version)


def test_a_frozen_language_model_that_should_be_trained_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, groups = trainer_of(sharp_checkpoint("qwen2_5_vl", tmp_path))
    monkeypatch.setattr(probing, "weights_behind", lambda output: set())
    with pytest.raises(ModelError, match="Trained weights: no trained weight of the language model has a gradient"):
        trainer.start_check.run(groups)


def test_full_tries_each_number_of_images_and_other_lengths(tmp_path: Path) -> None:
    """By default the first two groups are checked, and here they have no image and one."""
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path)
    one, other = noise_image(64, 48, seed=1), noise_image(32, 24, seed=2)
    images = [[], [one], [one], [other, one], [other]]
    groups = make_groups(checkpoint, [(each, [9 + i, 4]) for i, each in enumerate(images)])
    assert [groups.index(group) for group in chosen(groups, CheckedSize())] == [0, 1, 3]
    assert [groups.index(group) for group in chosen(groups, CheckedSize(groups=4))] == [0, 1, 2, 3]
    assert chosen(groups, ALL) == groups
    made = of_other_lengths(groups, longest=700, context=None)
    assert [[len(each.token_ids) for each in group.group.completions] for group in made] == [[16, 358, 700]] * 3
    assert [len(group.group.prompt.sample.images) for group in made] == [0, 1, 2]
    number = len(groups[3].group.prompt.token_ids)
    (group,) = of_other_lengths([groups[3]], longest=700, context=number + 40)
    assert [len(each.token_ids) for each in group.group.completions] == [16, 28, 40]
    trainer = make_trainer(make_policy(checkpoint), groups, prefix_sharing="auto", verify="full")
    proof = trainer.start_check.run(groups)
    assert {check.of: check.result for check in proof.checks if check.result != "holds"} == {ROLLOUTS: "untried"}


def test_made_up_completions_are_as_long_as_those_of_the_run(tmp_path: Path) -> None:
    """The doctor samples short completions, and proves rows of the run's own length."""
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path)
    groups = make_groups(checkpoint, [([noise_image(32, 24, seed=1)], [9, 4])])

    def lengths(config: RunConfig) -> list[int]:
        settings = {"verify": "full", "max_completion_length": config.rollout.max_completion_length}
        trainer = make_trainer(make_policy(checkpoint), groups, **settings, verify_length=config.model.verify_length)
        checked = trainer.start_check.computed(groups)
        assert checked is not None
        return [len(each.token_ids) for each in checked.rows.groups[-1].group.completions]

    run = make_config(checkpoint, tmp_path / "run", max_completion_length=700)
    doctor = RunConfig.model_validate(short_settings(run, tmp_path / "two_steps", num_prompts=2))
    assert doctor.rollout.max_completion_length == 16
    assert lengths(run) == lengths(doctor) == [16, 358, 700]


@pytest.mark.parametrize("family", in_tiers(sorted(set(FAULTS.values())), (), {"gemma3"}))
def test_flex_attention_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    trainer, groups = trainer_of(sharp_checkpoint(family, tmp_path))
    use_flex_attention(monkeypatch)
    proof = trainer.start_check.run(groups)
    assert all(check.holds for check in proof.checks) and proof.fallback is None


def test_a_check_without_memory_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, groups = trainer_of(sharp_checkpoint("qwen2_5_vl", tmp_path))
    budget = trainer.recovery.budget.tokens
    monkeypatch.setattr(trainer.policy, "score", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    (check,) = trainer.start_check.run(groups).checks
    assert str(check).startswith("the first rows were not checked: out of memory with 5 completions")
    assert str(check) in caplog.text and check.result == "untried"
    assert trainer.recovery.budget.tokens == budget


def test_a_resumed_run_goes_on_with_the_slower_way(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine where shared rows would be proven."""
    settings = {"prefix_sharing": "auto", "save_steps": 1, "resume_from_checkpoint": "auto"}
    with monkeypatch.context() as patched:
        use_flex_attention(patched, mask_off_by_a_block)
        train(make_config(tiny_checkpoint, tmp_path, max_steps=1, **settings))
    train(make_config(tiny_checkpoint, tmp_path, max_steps=2, **settings))
    first, second = read_starts(tmp_path)
    assert first["proof"]["fallback"] == "dense rows" and "shared rows and dense rows differ" in str(first["proof"])
    assert second["proof"]["fallback"] == "dense rows"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["compute/dense_forwards/not_proven"] > 0 for line in lines] == [True, True]
    assert not any(line.get("compute/shared_forwards") for line in lines)


def test_a_tower_that_runs_apart_has_gradients_elsewhere(tmp_path: Path) -> None:
    """Groups are cut, so that the forward has only the tower's features."""
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path)
    _, groups = trainer_of(checkpoint)
    trainer = make_trainer(make_policy(checkpoint), groups, prefix_sharing="auto", micro_batch_tokens=150)
    proof = trainer.start_check.run(groups)
    assert all(check.holds for check in proof.checks) and proof.checks[-1].of == GRADIENTS
    tower = len(trainer.policy.family.vision_parameters(trainer.policy.transformer))
    of_text = len(list(trainer.policy.parameters())) - tower
    found = str(proof.checks[-1])
    assert f": {of_text} of {of_text}; {tower} of the vision tower " in found
    assert found.endswith(", since it runs apart from the rows")


def test_rows_without_an_image_say_nothing_of_the_tower(tmp_path: Path) -> None:
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path)
    groups = make_groups(checkpoint, [([], [9, 4])])
    check = make_trainer(make_policy(checkpoint), groups).start_check.run(groups).checks[-1]
    assert str(check).endswith("since no prompt has an image")
    frozen = make_policy(checkpoint, freeze_vision_tower=True)
    assert str(make_trainer(frozen, groups).start_check.run(groups).checks[-1]) == "trained weights all have a gradient"


def test_a_weight_without_a_gradient_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, groups = trainer_of(sharp_checkpoint("qwen2_5_vl", tmp_path))
    trainer.policy.transformer.register_parameter("unused", torch.nn.Parameter(torch.zeros(1)))
    num = len(list(trainer.policy.parameters()))
    check = trainer.start_check.run(groups).checks[-1]
    assert str(check) == f"trained weights have a gradient: {num - 1} of {num}, not unused"
    assert ("WARNING", str(check)) in [(each.levelname, each.getMessage()) for each in caplog.records]


def test_a_tower_without_memory_for_its_gradients_skips_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a type without a row, the frozen tower runs once more, with gradients."""
    run = VisionEncoder.run

    def without_memory(encoder: VisionEncoder, rendered: Any) -> Any:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(encoder, rendered)

    checkpoint = sharp_checkpoint("lighton_ocr", tmp_path)
    trainer, groups = trainer_of(checkpoint, freeze_vision_tower=True)
    monkeypatch.setattr(VisionEncoder, "run", without_memory)
    check = trainer.start_check.run(groups).checks[-1]
    assert check.of == GRADIENTS and check.untried is not None and check.untried.startswith("out of memory with")


@pytest.mark.slow
def test_whole_weights_are_checked_for_gradients(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """ZeRO-2 shares the optimizer's state and gradients between ranks, and no weight."""
    runs = Runs.of(
        tmp_path, {"run": {"checkpoint": tiny_checkpoint, "max_steps": 1, "micro_batch_tokens": 8192}}
    ).launch("zero2")
    assert read_starts(runs["run"])[0]["proof"]["checks"][-1]["check"] == "trained weights all have a gradient"
