"""The memory profiler: bytes that modules keep, peaks of phases, and measurements of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from rl_vlm.passes import peaks
from rl_vlm.passes.peaks import Peaks, ResidentPeak
from rl_vlm.passes.schedule import Round
from rl_vlm.plan.memory import Load
from rl_vlm.stages import Stage, Stages
from rl_vlm.tools.profile.profiler import MemoryProfile
from rl_vlm.tools.profile.saved import Kept, SavedBytes, by_kind, by_layer
from rl_vlm.tools.profile.text import RankProfile, compared, largest_load, peak_line, spread
from rl_vlm.types import Forward
from tests.helpers.builders import make_groups, make_policy, noise_image, sharp_checkpoint, whole
from tests.unit.passes.test_peaks import Held

MIB = 2**20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_modules_keep_what_their_backward_needs():
    model, inputs = network(), torch.ones(3, 4)
    with SavedBytes(model, model) as saved:
        model(inputs).square().sum().backward()
    # The first layer keeps its input, the ReLU its output, which is the second layer's input as well, and the square
    # its own input: 3 rows of 4, 8 and 2 numbers of 4 bytes. Weights are not counted.
    assert saved.largest == {"0": 3 * 4 * 4, "1": 3 * 8 * 4, "loss": 3 * 2 * 4}


def test_the_largest_forward_counts():
    model = network()
    with SavedBytes(model, model) as saved:
        for rows in (2, 5, 3):
            model(torch.ones(rows, 4)).sum().backward()
    assert saved.largest == {"0": 5 * 4 * 4, "1": 5 * 8 * 4}


def test_nothing_is_counted_without_gradients_and_afterwards():
    model = network()
    with SavedBytes(model, model) as saved, torch.no_grad():
        model(torch.ones(3, 4))
    model(torch.ones(3, 4))
    assert saved.largest == {}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return recomputed(self.inner, inputs, use_reentrant=False)  # pyright: ignore[reportReturnType]


def test_recomputed_activations_are_not_kept():
    model = Recomputed()
    with SavedBytes(model, model) as saved:
        model(torch.ones(3, 4)).sum().backward()
    assert saved.largest == {"policy": 3 * 4 * 4}  # the input of the part that is recomputed


def test_a_forward_that_fails_leaves_no_module_running():
    model = network()
    with SavedBytes(model, model) as saved:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 5))
        assert saved.running == []


def test_modules_are_added_up_by_layer_and_by_kind():
    found = {"vision.0.mlp": 1, "text.layers.0.mlp": 10, "text.layers.1.mlp": 20, "text.layers.1.attn": 5, "norm": 2}
    assert by_layer(found) == [
        Kept("text.layers.1", 2, 25), Kept("text.layers.0", 1, 10), Kept("norm", 1, 2), Kept("vision.0", 1, 1),
    ]  # fmt: skip
    assert by_kind(found) == [
        Kept("text.layers.*.mlp", 2, 30), Kept("text.layers.*.attn", 1, 5), Kept("norm", 1, 2),
        Kept("vision.*.mlp", 1, 1),
    ]  # fmt: skip


def test_the_resident_peak_is_that_since_the_last_restart():
    peak = ResidentPeak()
    peak.restart()
    before = peak.read()
    large = torch.ones(64 * MIB // 4)
    del large
    assert 63 * MIB < peak.read() - before < 80 * MIB
    peak.restart()
    assert peak.read() - before < 16 * MIB


def test_a_system_that_does_not_count_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(peaks, "CLEAR_REFS", tmp_path / "clear_refs")
    with pytest.raises(Exception, match=r"memory_profile.*Linux"):
        ResidentPeak()


def test_a_profile_measures_beside_what_was_held_before():
    held = Held(100)
    profile = MemoryProfile(Peaks(held), {Stage.UPDATE}, plan=None)
    with Stages(profile).run(Stage.UPDATE):
        held.hold(120, 100)
    assert profile.stage_peaks == {"update": 20}


def test_the_first_training_passes_are_looked_into_and_three_steps_have_loads(checkpoint: Path):
    groups = make_groups(checkpoint, [([noise_image(32, 24, seed=1)], [3, 2]), ([], [4])])
    policy = make_policy(checkpoint)
    batch = whole(groups, shared=True)
    profile = MemoryProfile(Peaks(Held()), {Stage.TRAINING}, plan=None)
    profile.attach(policy)
    stages = Stages(profile)
    for within in (1, 0, 0, 0):
        with stages.run(Stage.TRAINING), stages.passes(Stage.TRAINING), stages.work(Round(Forward(batch, 0, within))):
            policy(Forward(batch)).logprobs_NT.sum().backward()
            assert bool(policy._forward_hooks) == bool(within)
    prompts = [len(group.group.prompt.token_ids) for group in groups]
    assert profile.loads == {Load(sum(prompts) + 3 + 2 + 4, groups[0].group.prompt.mm_inputs["pixel_values"].shape[0])}
    assert profile.saved is not None and sum(profile.saved.largest.values()) > 0


def test_ranks_are_compared():
    assert spread({0: 5, 1: 9, 2: 3}) == {"measured_bytes": 9, "measured_rank": 1, "least_bytes": 3, "least_rank": 2}
    assert set(spread({}).values()) == {None}


def test_without_a_plan_nothing_is_predicted():
    ranks = [RankProfile({"update": 5}, Load(3, 4)), RankProfile({"update": 8, "save": 2}, Load(7, 1))]
    found = compared(ranks, None)
    assert {name: phase["measured_bytes"] for name, phase in found.items()} == {"update": 8, "save": 2}
    assert all(phase["predicted_bytes"] is None and phase["predicted_parts"] == {} for phase in found.values())
    assert largest_load((rank.largest_micro_batch for rank in ranks), None) == Load(7, 1)


def test_the_line_names_the_phase_that_held_most():
    phases = {
        "load": {"measured_bytes": 2**30, "measured_rank": 0, "predicted_bytes": 2**30},
        "update": {"measured_bytes": 3 * 2**30, "measured_rank": 1, "predicted_bytes": 5 * 2**29},
        "weight_sync": {"measured_bytes": None, "measured_rank": None, "predicted_bytes": 2**40},
    }
    assert peak_line(phases) == "memory peak: update, 3.00 GiB on rank 1, predicted 2.50"
