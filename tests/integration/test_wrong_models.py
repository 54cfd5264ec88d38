"""Twelve wrong models, each stopped by the proof before the first step, run in a slower way, or refused before it.

Then thirty right runs, of which the proof stops none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_vlm.errors import RLVLMError
from rl_vlm.log.starts import read_starts
from rl_vlm.model import policy as policy_module
from rl_vlm.model.layout import ForwardInputs
from rl_vlm.model.policy import Policy
from rl_vlm.model.vision import ImageFeatures, VisionEncoder
from rl_vlm.passes.proof import Proof
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.run.run import train
from rl_vlm.types import Prompt, RolloutRequest, Sampling, ScoredGroup
from tests.helpers.builders import make_group, make_policy, make_prompt, noise_image, processor_of, sharp_checkpoint
from tests.helpers.flex_on_cpu import mask_off_by_a_block, use_flex_attention
from tests.helpers.given_groups import make_trainer
from tests.helpers.tiny_run import make_config
from tests.helpers.wrong_rows import see_each_other
from tests.tiny.build import TINY_FAMILIES

FAMILY = "qwen2_5_vl"
LARGE, SMALL = noise_image(64, 48, seed=1), noise_image(64, 48, seed=2)
"""Images of equal sizes, so that no count shows which is which."""


@dataclass(frozen=True)
class Plant:
    """Where a fault is planted: in the files of a checkpoint, in the code, or in the groups."""

    checkpoint: Path
    patches: pytest.MonkeyPatch

    def groups(self) -> list[ScoredGroup]:
        """A group with two images, and one with the second of them."""
        prompts = [make_prompt(self.checkpoint, [LARGE, SMALL]), make_prompt(self.checkpoint, [SMALL], "Why so?")]
        return [make_group(prompt, lengths) for prompt, lengths in zip(prompts, ([9, 4], [7, 3]), strict=True)]

    def proof(self, policy: Policy | None = None, groups: Sequence[ScoredGroup] = (), **settings: Any) -> Proof:
        """The proof of the first step. Prefixes are shared if that is proven."""
        groups = list(groups) or self.groups()
        trainer = make_trainer(policy or make_policy(self.checkpoint), groups, prefix_sharing="auto")
        return trainer.start_check.run(groups, **settings)

    def edit(self, name: str, **values: Any) -> None:
        """Change values of a JSON file of the checkpoint."""
        path = self.checkpoint / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def change_rows(self, change: Callable[[ForwardInputs], ForwardInputs], *names: str) -> None:
        """Change the inputs of rows of some layouts."""
        for name in names:
            made = getattr(policy_module, name)
            self.patches.setattr(policy_module, name, lambda *args, made=made: change(made(*args)))

    def change_features(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change what the run's tower computes, and not what the model's own forward computes."""
        run = VisionEncoder.run

        def wrong(encoder: VisionEncoder, rendered: Any) -> dict[Any, ImageFeatures]:
            found = run(encoder, rendered)
            return {each: replace(of, embeddings=change(of.embeddings)) for each, of in found.items()}

        self.patches.setattr(VisionEncoder, "run", wrong)


def leaking_mask(plant: Plant) -> Proof:
    plant.change_rows(see_each_other, "shared_inputs")
    return plant.proof()


def positions_from_zero(plant: Plant) -> Proof:
    def change(rows: ForwardInputs) -> ForwardInputs:
        positions = rows.kwargs["position_ids"]
        return replace(rows, kwargs=rows.kwargs | {"position_ids": positions % positions.shape[-1] % 7})

    plant.change_rows(change, "shared_inputs", "dense_inputs")
    return plant.proof()


def dropped_image(plant: Plant) -> Proof:
    """The tokens of a prompt's second image have no features."""

    def change(embeddings: Tensor) -> Tensor:
        kept = torch.arange(len(embeddings))[:, None] < len(embeddings) // 2
        return embeddings * kept

    plant.change_features(change)
    return plant.proof()


def tower_in_another_precision(plant: Plant) -> Proof:
    plant.change_features(lambda embeddings: embeddings.to(torch.bfloat16).float())
    return plant.proof()


def processor_of_another_revision(plant: Plant) -> Proof:
    """Its tokens of an image are four times as many."""
    name = "processor_config.json"
    settings = json.loads((plant.checkpoint / name).read_text())
    plant.edit(name, image_processor=settings["image_processor"] | {"merge_size": 1})
    processor_of.cache_clear()
    return plant.proof()


def kernel_with_a_wrong_block(plant: Plant) -> Proof:
    use_flex_attention(plant.patches, mask_off_by_a_block)
    return plant.proof(groups=[make_group(make_prompt(plant.checkpoint, [LARGE]), [200, 31, 90])])


def dropout_on(plant: Plant) -> Proof:
    policy = make_policy(plant.checkpoint)
    policy.transformer.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: torch.nn.functional.dropout(torch.as_tensor(output), 0.2)
    )
    return plant.proof(policy)


def tied_head_untied(plant: Plant) -> Proof:
    """The checkpoint has no head, since it was tied, and its config says that it is not."""
    weights = load_file(plant.checkpoint / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, plant.checkpoint / "model.safetensors", metadata={"format": "pt"})
    plant.edit("config.json", tie_word_embeddings=False)
    return plant.proof()


def placeholder_sampled(plant: Plant) -> Proof:
    policy, groups = make_policy(plant.checkpoint), plant.groups()
    policy.banned_token_ids = [policy.transformer.config.image_token_id]
    groups[0].group.completions[1].token_ids[2] = policy.banned_token_ids[0]
    return plant.proof(policy, groups)


def wrong_adapter_scale(plant: Plant) -> Proof:
    """The engine samples with twice the scale that is trained with."""
    policy, groups = make_policy(plant.checkpoint, use_peft=True), plant.groups()
    layers: list[Any] = [module for module in policy.modules() if hasattr(module, "lora_A")]

    def scale(factor: float) -> None:
        for layer in layers:
            layer.scaling["default"] *= factor

    engine = HFEngine.for_policy(policy, processor_of(plant.checkpoint).tokenizer, max_num_seqs=8)
    sampling = Sampling(num_generations=2, max_completion_length=8, temperature=1.0, seed=0)
    scale(2)
    sampled = engine.generate([RolloutRequest(str(i), group.group.prompt) for i, group in enumerate(groups)], sampling)
    scale(0.5)
    groups = [replace(each, group=group) for each, group in zip(groups, sampled, strict=True)]
    return plant.proof(policy, groups, policy_version=0)


def stale_cache(plant: Plant) -> Proof:
    """A cache of image features takes all images for equal."""
    plant.patches.setattr(Prompt, "digest", property(lambda prompt: b"the same"))
    images = [([LARGE], [5, 9]), ([SMALL], [7, 4])]
    return plant.proof(groups=[make_group(make_prompt(plant.checkpoint, *each[:1]), each[1]) for each in images])


def images_exchanged(plant: Plant) -> Proof:
    """Each prompt has the values of pixels in reverse order."""

    def change(rows: ForwardInputs) -> ForwardInputs:
        others: dict[Any, Any] = {}
        for each in rows.rendered:
            pixels = {"pixel_values": each.mm_inputs["pixel_values"].flip(0)}
            others.setdefault(each, replace(each, mm_inputs=each.mm_inputs | pixels))
        return replace(rows, rendered=[others[each] for each in rows.rendered])

    plant.change_rows(change, "shared_inputs", "dense_inputs")
    return plant.proof()


SLOWER = "dense rows"
UNLIKE_OWN = "own forward differ on this CPU in log-probs by"
WRONG_MODELS: dict[Callable[[Plant], Proof], str] = {
    leaking_mask: SLOWER,
    positions_from_zero: UNLIKE_OWN,
    dropped_image: UNLIKE_OWN,
    tower_in_another_precision: UNLIKE_OWN,
    processor_of_another_revision: "Its processor may be of another revision",
    kernel_with_a_wrong_block: SLOWER,
    dropout_on: "same rows once more differ on this CPU in log-probs by",
    tied_head_untied: r"does not have 1 tensors \(lm_head.weight",
    placeholder_sampled: "holds placeholder tokens",
    wrong_adapter_scale: "Rollouts and dense rows differ on this CPU in log-probs by",
    stale_cache: UNLIKE_OWN,
    images_exchanged: UNLIKE_OWN,
}
"""Each fault, with the slower way that its run goes on with, or the error that ends it."""


def test_the_model_trains_without_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = Plant(sharp_checkpoint(FAMILY, tmp_path), monkeypatch).proof()
    assert proof.fallback is None and all(check.holds for check in proof.checks)
    assert len(WRONG_MODELS) == 12


@pytest.mark.parametrize("fault", WRONG_MODELS, ids=lambda fault: fault.__name__)
def test_a_wrong_model_does_not_train(
    fault: Callable[[Plant], Proof], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Plant(sharp_checkpoint(FAMILY, tmp_path), monkeypatch)
    expected = WRONG_MODELS[fault]
    if expected == SLOWER:
        proof = fault(plant)
        print(fault.__name__, *(check for check in proof.checks if not check.holds), sep="\n")
        assert proof.fallback == SLOWER
        return
    with pytest.raises(RLVLMError, match=expected) as raised:
        fault(plant)
    print(fault.__name__, raised.value, sep="\n")


TEN_FAMILIES = (
    "qwen2_5_vl", "qwen3_vl", "gemma3", "mllama", "qwen3_5", "internvl", "paligemma", "idefics3", "llava_next", "glm4v",
)  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"dtype": "bfloat16", "use_peft": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_a_right_run_is_not_stopped(family: str, run: str, tmp_path: Path) -> None:
    if family not in TINY_FAMILIES:
        pytest.skip(f"the installed transformers has no {family}")
    checkpoint = sharp_checkpoint(family, tmp_path / "model")
    train(make_config(checkpoint, tmp_path / "run", max_steps=1, prefix_sharing="auto", verify="full", **RUNS[run]))
    (start,) = read_starts(tmp_path / "run")
    print(family, run, *(check["check"] for check in start["proof"]["checks"]), sep="\n")
    assert start["proof"]["fallback"] is None
    assert {check["result"] for check in start["proof"]["checks"]} <= {"holds", "untried"}
    held = [check["check"] for check in start["proof"]["checks"] if check["result"] == "holds"]
    assert len(held) >= 6 and any(text.startswith("rollouts and dense rows differ") for text in held)
