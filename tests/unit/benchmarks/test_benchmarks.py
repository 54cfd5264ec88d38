"""The arithmetic behind the benchmarks' ceilings, on literal values and against what torch counts."""

import argparse
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import (
    batch_memory,
    edited_contexts,
    patch_embed,
    report,
    scaling,
    scaling_model,
    sharding,
    sharding_tables,
    sides,
    slow_tools,
    start_proof,
    train_step,
    trajectories,
    video,
    vision_apart,
    whole_run,
    whole_run_sides,
    whole_run_tables,
)
from benchmarks.common import ROOT, ratio
from benchmarks.communication import CountTraffic
from benchmarks.counting import counted_flops
from benchmarks.decode_steps import decode_row
from benchmarks.flops import (
    FORWARD_ONLY,
    FULL,
    Flops,
    Passes,
    Training,
    Workload,
    causal_pairs,
    dense_flops,
    floor_flops,
    flop_ceiling,
    head_flops,
    language_flops,
    rollout_flops,
    shared_flops,
    vision_flops,
)
from benchmarks.shapes import QWEN2_5_VL_3B, SMALL, TOY, TOY_HYBRID, Shape, model_config
from benchmarks.sides import Setup, Side, differences, floor_side, own_side
from rl_vlm.passes.micro_batches import make_micro_batches
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.types import RolloutRequest, Sampling

pytestmark = pytest.mark.ci

WORK = Workload(image_tokens=24, text_tokens=20, completion_tokens=10, num_generations=3)
TRAJECTORIES = Workload(24, 20, 10, 3, observed_image_tokens=12, observed_text_tokens=20)


def test_token_ratio_is_dense_over_shared_tokens():
    assert Workload(1000, 40, 200, 8).token_ratio == 8 * 1240 / (1040 + 1600)
    assert Workload(num_generations=1).token_ratio == 1


@pytest.mark.parametrize(("tokens", "grid"), [(1000, (25, 40)), (1024, (32, 32)), (7, (1, 7))])
def test_the_image_is_as_square_as_its_tokens_allow(tokens, grid):
    assert Workload(image_tokens=tokens).image_grid == grid


def test_observations_are_tokens_of_the_path_and_images_of_each_completion():
    work = Workload(30, 10, 20, 2, observed_image_tokens=15, observed_text_tokens=5)
    assert (work.path_tokens, work.unique_tokens, work.token_ratio) == (40, 40 + 2 * 40, 2 * 80 / 120)
    config = model_config(TOY)
    tower, text = config.vision_config, config.text_config
    prompt, crop = vision_flops(tower, (5, 6), FULL), vision_flops(tower, (3, 5), FULL)
    shared, dense = shared_flops(config, work, Training()), dense_flops(config, work, Training(), vision_once=True)
    trl = dense_flops(config, work, Training())
    assert shared.vision == dense.vision == prompt + 2 * crop
    assert trl.vision == 2 * prompt + 2 * crop
    assert shared.language == language_flops(text, 120, 40 * 41 / 2 + 2 * (40 * 40 + 40 * 41 / 2), FULL)
    assert dense.language == trl.language == language_flops(text, 2 * 80, 2 * 80 * 81 / 2, FULL)
    assert shared.head == dense.head == head_flops(text, 2 * 20, 4)  # sampled tokens
    assert trl.head == head_flops(text, 2 * 40, 4)  # observed ones too


def test_language_flops_by_hand():
    text = SimpleNamespace(
        hidden_size=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8, num_hidden_layers=3
    )
    matrices = 2 * 4 * 4 + 2 * 4 * 2 + 3 * 4 * 8  # q and o, k and v, the MLP
    assert language_flops(text, tokens=5, pairs=0) == 3 * 2 * 5 * matrices
    assert language_flops(text, tokens=0, pairs=15) == 3 * 15 * (2 * 4 + 2 * 4)  # scores, and the sum of values
    adapters = 2 * (4 + 4) + 2 * (4 + 2) + 3 * (4 + 8)
    assert language_flops(text, 5, 0, Passes(0, 0, 1), lora_r=6) == 3 * 2 * 5 * 6 * adapters
    assert head_flops(SimpleNamespace(hidden_size=4, vocab_size=10), tokens=5, passes=3) == 3 * 2 * 5 * 4 * 10


def test_linear_attention_flops_by_hand():
    text = SimpleNamespace(
        hidden_size=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8, num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"], linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=3, linear_value_head_dim=5,
    )  # fmt: skip
    mlp = 3 * 4 * 8
    attention = 4 * 8 + 2 * 4 * 2 + 4 * 4 + mlp  # q with a gate, k and v, o
    linear = 4 * (3 + 3 + 10) + 4 * 10 + 2 * 4 * 2 + 10 * 4 + mlp  # q, k and v, gate, decay and rate, output
    rule = 2 * (64 * (2 * 3 + 2 * 3 + 3 + 5 + 2 * 5) + 2 * 3 * 15)  # per head: within a chunk of 64, and the state
    assert language_flops(text, tokens=5, pairs=0) == 2 * 5 * attention + 2 * (2 * 5 * linear + 5 * rule)


def test_a_tower_without_windows_by_hand():
    vision = SimpleNamespace(
        spatial_merge_size=2, hidden_size=4, patch_size=1, depth=3, in_channels=3, temporal_patch_size=2,
        intermediate_size=8, out_hidden_size=16,
    )  # fmt: skip
    blocks, embed, merger = 3 * (4 * 16 + 2 * 32), 6 * 4, (16 * 16 + 16 * 16) / 4
    assert vision_flops(vision, (2, 3), FORWARD_ONLY) == 2 * 24 * (blocks + embed + merger) + 4 * 4 * 3 * 24**2


def test_vision_flops_by_hand():
    vision = SimpleNamespace(
        spatial_merge_size=2, hidden_size=4, patch_size=1, window_size=4, depth=3, fullatt_block_indexes=[2],
        in_channels=3, temporal_patch_size=2, intermediate_size=8, out_hidden_size=16,
    )  # fmt: skip
    num_patches = 4 * 6  # of 2 x 3 image tokens, in windows of 4 x 4 and 4 x 2
    blocks, embed, merger = 3 * (4 * 16 + 3 * 32), 6 * 4, (16 * 16 + 16 * 16) / 4
    linear = 2 * num_patches * (blocks + embed + merger)
    pairs = 2 * (16**2 + 8**2) + num_patches**2
    assert vision_flops(vision, (2, 3), FORWARD_ONLY) == linear + 4 * 4 * pairs


def test_ceilings_of_the_real_model():
    """Qwen2.5-VL-3B at the sizes that the documentation states."""
    config = model_config(QWEN2_5_VL_3B)
    lora = Training(lora_r=16, gradient_checkpointing=True)
    assert flop_ceiling(config, Workload(), Training()) == pytest.approx(4.61, abs=0.01)
    assert flop_ceiling(config, Workload(num_generations=16), Training()) == pytest.approx(6.21, abs=0.01)
    assert flop_ceiling(config, Workload(num_generations=16), lora) == pytest.approx(7.16, abs=0.01)


def proportions(shape: Shape, work: Workload) -> Flops:
    """Compute the share of each part in one forward of one padded row, as on the dense path."""
    config = model_config(shape)
    row = work.prompt_tokens + work.completion_tokens
    flops = Flops(
        vision_flops(config.vision_config, work.image_grid),
        language_flops(config.text_config, row, causal_pairs(row)),
        head_flops(config.text_config, work.completion_tokens),
    )
    return Flops(flops.vision / flops.total, flops.language / flops.total, flops.head / flops.total)


def test_the_small_shape_has_the_real_models_proportions():
    ours, real = proportions(SMALL, Workload()), proportions(QWEN2_5_VL_3B, Workload())
    for part in ("vision", "language", "head"):
        assert getattr(ours, part) == pytest.approx(getattr(real, part), abs=0.01), part


@pytest.fixture(scope="module", params=["full", "lora", "beta"])
def training(request):
    return {
        "full": Training(),
        "lora": Training(lora_r=4, gradient_checkpointing=True),
        "beta": Training(beta=0.1),
    }[request.param]


@pytest.fixture(scope="module")
def setup(training, tmp_path_factory):
    return Setup.build(TOY, WORK, training, tmp_path_factory.mktemp("toy") / "model")


def test_flops_are_those_that_torch_counts(setup):
    config = model_config(TOY)
    work, training = setup.work, setup.training
    sides = {
        "shared": (own_side(setup, True), shared_flops(config, work, training)),
        "dense": (own_side(setup, False), dense_flops(config, work, training, vision_once=True)),
        "floor": (floor_side(setup), floor_flops(config, work, training)),
    }
    for name, (side, expected) in sides.items():
        assert counted_flops(side.run) == pytest.approx(expected.total, rel=0.06), name


def test_flops_of_linear_attention_are_those_that_torch_counts(training, tmp_path):
    """Of a prompt and completions of whole chunks."""
    work = Workload(image_tokens=98, text_tokens=30, completion_tokens=64, num_generations=2)
    setup = Setup.build(TOY_HYBRID, work, training, tmp_path / "model")
    expected = shared_flops(model_config(TOY_HYBRID), work, training).total
    assert counted_flops(own_side(setup, True).run) == pytest.approx(expected, rel=0.06)


def test_flops_of_trajectories_are_those_that_torch_counts(training, tmp_path):
    """Both rows have the same gradients too."""
    setup = Setup.build(TOY, TRAJECTORIES, training, tmp_path / "model")
    config, sides = model_config(TOY), (own_side(setup, True), own_side(setup, False))
    expected = shared_flops(config, TRAJECTORIES, training), dense_flops(config, TRAJECTORIES, training, True)
    for side, flops in zip(sides, expected, strict=True):
        assert counted_flops(side.run) == pytest.approx(flops.total, rel=0.06)
    found = differences(*sides)
    assert found["loss"] < 1e-5
    assert found["gradient"] < 1e-4


def test_a_longer_video_has_more_frames_of_the_same_size():
    for tokens, frames in ((2048, 16), (4096, 32), (8192, 64), (192, 2)):
        assert video.parse(["--image-tokens", str(tokens)]).num_frames == frames
    assert video.workload(video.parse(["--image-tokens", "8192"])).image_grid == (16, 16)
    assert video.parse(["--image-tokens", "8192", "--num-frames", "8"]).num_frames == 8


def test_flops_of_a_video_are_those_that_torch_counts(tmp_path):
    """All sides have the same gradients too. The model's own forward encodes the video for each completion."""
    arguments = "--shape toy --image-tokens 192 --num-frames 8 --num-generations 3 --completion-tokens 12".split()
    args = video.parse(arguments)
    setup = video.COMPARED.setup(args, tmp_path)
    assert setup.group.group.prompt.mm_inputs["video_grid_thw"].tolist() == [[4, 12, 16]]
    sides = {name: make(setup, tmp_path / name) for name, make in video.COMPARED.sides.items()}
    for name, expected in video.COMPARED.flops(args).items():
        assert counted_flops(sides[name].run) == pytest.approx(expected, rel=0.06)
    assert differences(sides["shared"], sides["dense"])["gradient"] < 1e-4
    assert differences(own_side(setup, True, bans=False), sides["plain"])["gradient"] < 1e-4


@pytest.mark.slow
def test_video_against_the_models_own_forward():
    arguments = "--shape toy --image-tokens 192 --num-frames 8 --num-generations 2 --repeats 1".split()
    result = video.COMPARED.measure(video.parse([*arguments, "--completion-tokens", "9"]))
    assert "plain over shared: time" in video.COMPARED.table(result)
    assert "vs plain, 192 video tokens, G = 2" in report.compared_table([result])


@pytest.mark.parametrize("shape", [TOY, TOY_HYBRID], ids=["attention", "hybrid"])
def test_both_paths_have_the_same_gradients(shape, training, tmp_path):
    setup = Setup.build(shape, WORK, training, tmp_path / "model")
    found = differences(own_side(setup, True), own_side(setup, False))
    assert found["loss"] < 1e-5
    assert found["gradient"] < 1e-4


def test_padded_rows_in_several_micro_batches_are_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sides, "MOST_ROWS", 2)  # of 3 rows
    setup = Setup.build(TOY, WORK, Training(), tmp_path / "model")
    found = differences(own_side(setup, True), own_side(setup, False))
    assert found["loss"] < 1e-5
    assert found["gradient"] < 1e-4


def test_other_gradients_are_an_error():
    def side(bias: bool) -> Side:
        model = torch.nn.Linear(2, 2, bias=bias)
        return Side(model, lambda: [model(torch.ones(1, 2)).sum()])

    with pytest.raises(AssertionError, match="bias"):
        differences(side(bias=True), side(bias=False))


def test_no_script_hides_a_package():
    """A script's folder is first on the path: transformers took `kernels.py` there for the package of this name."""
    places = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")]
    scripts = [path.stem for path in (ROOT / "benchmarks").glob("*.py")]
    assert PathFinder.find_spec("json", places) is not None
    assert [name for name in scripts if name == "kernels" or PathFinder.find_spec(name, places)] == []


def test_ratios_are_medians_over_rounds():
    assert ratio({"peer": [4.0, 9.0, 20.0], "ours": [2.0, 3.0, 2.0]}, "peer", "ours") == 3.0


def test_peak_growth_sees_what_was_freed_again():
    # In a process of its own: tests before this one may have left free memory that no new page is needed for.
    code = (
        "import torch; from benchmarks.common import peak_growth; print(peak_growth(lambda: torch.ones(2**24).sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 60 * 2**20 < int(done.stdout) < 100 * 2**20  # 64 MiB


def test_the_model_of_scaling_adds_computing_and_sending():
    traffic = {"1": {"sent": 60.0}, "3": {"sent": 180.0}}
    measured = {"steps": [{"sharding": "e", "num_parameters": 10, "num_processes": 2, "ranks": [{"traffic": traffic}]}]}
    units = scaling_model.measured_units(measured)
    assert units == {"e": (0.0, 3.0)}  # 60 bytes are 3 times half of the weights' 40
    given = scaling_model.Assumptions(weights=1.0, tokens=1.0, micro_batches=2, flops=16.0, reached=0.5, variation=0.0)
    sharding = scaling_model.Sharding("sharded", "e")
    seconds = [
        scaling_model.step_seconds(sharding, units["e"], nodes, 10.0, given, is_strong)
        for nodes, is_strong in ((1, False), (2, False), (2, True))
    ]
    # 8 FLOPs a token at 8 FLOPs a second; 3 x 4 bytes for each micro-batch, 15/16 of them sent at 10 bytes a second
    assert seconds == pytest.approx([2 + 2 * 12 * 7 / 8 / 450e9, 2 + 2 * 1.125, 1 + 1.125])


def test_little_to_share_has_a_ratio_below_1_15():
    assert 1 < scaling.LITTLE_TO_SHARE.token_ratio < 1.15


@pytest.mark.parametrize("case", [(5, 3 * 2 * 4 * 4), (2, 3, 11, 8)])
def test_linear_patch_embedding_equals_the_convolution(case):
    conv = torch.nn.Conv3d(3, 6, (2, 4, 4), (2, 4, 4)) if len(case) == 2 else torch.nn.Conv2d(3, 6, 4, 4)
    values = torch.randn(case)
    torch.testing.assert_close(patch_embed.linear(conv, values), patch_embed.convolution(conv, values))


def test_tables_go_between_their_marks():
    text = "before\n<!-- scaling -->\nold\n<!-- end -->\nafter"
    assert report.fill(text, "scaling", "new") == "before\n<!-- scaling -->\nnew\n<!-- end -->\nafter"
    with pytest.raises(ValueError, match="rollout"):
        report.fill(text, "rollout", "new")


def test_the_page_has_a_place_for_each_benchmark_and_shows_each_chart_that_was_drawn():
    page = report.PAGE.read_text()
    for name in report.REPORTS:
        assert f"<!-- {name} -->" in page
        chart = report.PAGE.parent / "images" / f"benchmark_{name}.png"
        assert chart.exists() == (f"images/{chart.name}" in page)


def test_memory_is_measured_on_the_same_case():
    args = train_step.parse("--num-generations 4 --image-tokens 64 --completion-tokens 9 --lora --beta 0.1".split())
    again = train_step.parse(train_step.memory_arguments(args, "trl"))
    assert isinstance(again, argparse.Namespace)
    assert again.memory_of == "trl"
    assert train_step.workload(again) == train_step.workload(args)
    assert train_step.training(again) == train_step.training(args)


@pytest.fixture
def four_ranks():
    """The first of four ranks, whose collectives move nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield dist
    dist.destroy_process_group()


def test_traffic_of_each_collective_is_counted(four_ranks):
    part, whole = torch.zeros(8), torch.zeros(32)  # 32 and 128 bytes
    with CountTraffic() as counter:
        four_ranks.all_reduce(whole)
        four_ranks.all_gather_into_tensor(whole, part)
        four_ranks.all_gather([torch.zeros(8) for _ in range(4)], part)
        four_ranks.reduce_scatter_tensor(part, whole)
        four_ranks.broadcast(whole, src=0)
        torch.ops._c10d_functional.all_gather_into_tensor(part, 4, four_ranks.group.WORLD.group_name)
        four_ranks.barrier()
    assert counter.payloads == {
        "allreduce_": 128, "_allgather_base_": 128, "allgather_": 128, "_reduce_scatter_base_": 128,
        "broadcast_": 128, "all_gather_into_tensor": 128,
    }  # fmt: skip
    assert counter.sent(world_size=4) == (2 + 5) * 128 * 3 / 4


def two_layers() -> torch.nn.Sequential:
    """Return a model of 64 weights, which are 256 bytes."""
    return torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 4, bias=False))


def traffic_of_a_pass(model: torch.nn.Module) -> dict[str, int]:
    with CountTraffic() as counter:
        model(torch.ones(1, 4)).sum().backward()
    return dict(counter.payloads)


def test_traffic_of_layers_that_are_gathered_is_counted(four_ranks):
    from torch.distributed.fsdp import fully_shard

    model = two_layers()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # Gathered for the forward and for the backward.
    assert traffic_of_a_pass(model) == {"_allgather_base_": 512, "_reduce_scatter_base_": 256}


def test_traffic_of_reducers_in_cpp_is_counted():
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        model = torch.nn.parallel.DistributedDataParallel(two_layers())
        assert traffic_of_a_pass(model) == {"allreduce_": 256}
    finally:
        torch.distributed.destroy_process_group()


def test_memory_in_theory():
    """Of weights, gradients and moments: 16 bytes per parameter, which is 4 times the weights."""
    assert sum(sharding_tables.theory("ddp", 2, has_reference=False).values()) == 4
    assert sum(sharding_tables.theory("zero2", 4, has_reference=False).values()) == 1 + 4 / 4
    assert sum(sharding_tables.theory("zero3", 4, has_reference=False).values()) == 5 / 4
    assert sum(sharding_tables.theory("fsdp2", 4, has_reference=True).values()) == 5 / 4


@pytest.mark.slow
def test_engines_hold_and_move_what_they_should():
    """Of a model with a few weights outside of layers, which FSDP2 gathers once, and small ones that ZeRO-3 keeps."""
    pytest.importorskip("deepspeed")
    result = sharding.measure(sharding.parse(["--small", "--shardings", "ddp", "zero3_freed", "fsdp2"]))
    whole = 4 * result["steps"][0]["num_parameters"]
    (ddp, zero, fsdp) = [case["ranks"] for case in result["steps"]]
    for rank in ddp:
        assert rank["traffic"]["1"]["sent"] == pytest.approx(whole, rel=0.01)  # 2 (N - 1) / N
        assert rank["traffic"]["3"]["sent"] == rank["traffic"]["1"]["sent"]  # once per step
        assert rank["held"]["weights"] == whole
    for rank in [*zero, *fsdp]:
        assert rank["held"]["weights"] == pytest.approx(whole / 2, rel=0.1)
        assert rank["held"]["moments"] == pytest.approx(whole, rel=0.01)
        assert rank["traffic"]["3"]["sent"] == pytest.approx(3 * rank["traffic"]["1"]["sent"], rel=0.05)
        assert rank["gathered"]["within"] > rank["gathered"]["before"] + 0.9 * whole
        assert rank["gathered"]["after"] <= rank["gathered"]["before"]
    assert "FSDP2" in sharding_tables.sharding_tables(result)


@pytest.mark.parametrize(("tower", "image_cost"), [("frozen", 0), ("trained", 90)])
def test_the_micro_batches_of_every_case_fill_the_budget(tower: str, image_cost: int, tmp_path: Path):
    """Of batch_memory. An image of 36 tokens has 144 patches; a patch costs 80 / 128 tokens: the widths."""
    checkpoint = batch_memory.build_checkpoint(batch_memory.SHAPE, tmp_path)
    budget = batch_memory.BUDGETS[tower]
    for num_generations, num_prompts in batch_memory.CASES.values():
        groups = batch_memory.make_groups(checkpoint, tower, num_generations, min(num_prompts, 8))
        assert len({id(group.group.prompt) for group in groups}) == len(groups)
        first = make_micro_batches(groups, budget, "shared", lambda prompt: image_cost)[0]
        prompts = [len(s.prompt.token_ids) + image_cost * (not s.vision_apart) for s in first.subgroups]
        tokens = sum(prompts) + sum(len(completion.token_ids) for completion in first.completions)
        assert 0.97 * budget < tokens <= budget
        assert 4 <= len(first.completions) <= 5


def test_a_tower_that_runs_apart_has_the_gradients_of_one_in_each_micro_batch(tmp_path: Path):
    case = vision_apart.Case.build("toy", tmp_path, checkpointing=False)
    apart, in_each = case.run(apart=True), case.run(apart=False)
    assert any("visual" in name for name in in_each)
    assert apart.keys() == in_each.keys()
    assert max(float((apart[n] - g).norm() / g.norm().clamp(min=1e-6)) for n, g in in_each.items()) <= 1e-4


@pytest.mark.slow
def test_train_step_against_trl(tmp_path: Path):
    arguments = "--shape toy --image-tokens 24 --completion-tokens 8 --num-generations 2 --repeats 1".split()
    result = train_step.measure(train_step.parse(arguments))
    assert result["differences"]["gradient"] < 1e-4
    assert result["counted_flops"]["trl"] == pytest.approx(result["flops"]["trl"], rel=0.1)
    assert {"speedup_vs_peer", "flop_ceiling", "peak_memory_vs_peer", "time_vs_floor", "versions", "machine"} <= set(
        result
    )
    assert "flop_ceiling" in train_step.table(result)


@pytest.mark.slow
def test_trajectories_against_trl():
    arguments = "--shape toy --image-tokens 24 --observed-image-tokens 12 --num-generations 2 --repeats 1".split()
    result = trajectories.COMPARED.measure(trajectories.parse([*arguments, "--completion-tokens", "9"]))
    for peer in ("dense", "trl"):
        assert result["differences"][peer]["gradient"] < 1e-4
        assert result["counted_flops"][peer] == pytest.approx(result["flops"][peer], rel=0.1)
        assert result["share_of_ceiling"][peer] > 0
    assert "trl over shared: time" in trajectories.COMPARED.table(result)
    assert "vs trl, G = 2" in report.compared_table([result])


def test_edited_contexts_have_the_gradients_of_contexts_apart(tmp_path: Path):
    arguments = "--shape toy --turns 6 --keep-images 1 --edit-every 2 --num-generations 2 --image-tokens 24".split()
    arguments += ["--micro-batch-tokens", "300"]
    episodes = edited_contexts.Episodes(edited_contexts.parse([*arguments, "--observed-image-tokens", "12"]), tmp_path)
    first = episodes.edited.group.completions[0]
    assert [sum(isinstance(part, int) for part in context.parts) for context in first.contexts] == [2, 2, 2]
    shared, cut, apart, whole = (episodes.gradients(side) for side in edited_contexts.NAMES)
    assert max((side - apart).norm() for side in (shared, cut)) <= 1e-5 * apart.norm()
    assert (whole - apart).norm() >= 1e-2 * apart.norm()
    assert [len(each.group.completions) for each in edited_contexts.contexts_apart(episodes.edited)] == [1] * 6


def test_an_engine_waits_less_for_slow_tools_if_trajectories_advance_alone():
    arguments = "--prompts 2 --num-generations 4 --turn-seconds 0.1 --median 0.05 --fastest 0.01 --slowest 1".split()
    result = slow_tools.measure(slow_tools.parse(arguments))
    waves, alone = (result["sides"][side] for side in ("in waves", "independently"))
    assert alone["engine_waits"] < waves["engine_waits"] < 1
    assert "| independently |" in slow_tools.table(result)


def test_a_stage_does_not_count_the_stages_within_it(monkeypatch: pytest.MonkeyPatch):
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(whole_run_sides.time, "perf_counter", lambda: next(times))
    clock = whole_run_sides.Clock("cpu")
    with clock.stage("other"), clock.stage("training"), clock.stage("log-probs"):
        pass  # of the loss, so they are training
    assert clock.seconds == {"other": 1 + 5, "training": 2 + 3 + 4}


EQUAL_SETTINGS = {
    "rollout": "num_generations max_completion_length temperature top_p top_k min_p",
    "algorithm": "loss_type epsilon epsilon_high delta beta num_iterations scale_rewards importance_sampling_level "
    "mask_truncated_completions top_entropy_quantile use_bias_correction_kl sync_ref_model",
    "train": "max_steps learning_rate lr_scheduler_type warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "max_grad_norm",
    "data": "shuffle_dataset dataloader_num_workers",
    "memory": "gradient_checkpointing",
}


def test_both_sides_of_a_whole_run_have_the_same_settings(tmp_path: Path):
    """TRL's micro-batch holds two groups of 4 rows of 64 tokens: three fit into 800, but do not divide a step of 4."""
    from trl.trainer.grpo_config import GRPOConfig

    args = whole_run.parse(
        "--small --prompts-per-step 4 --micro-batch-tokens 800 --beta 0.1 --num-iterations 2".split()
    )
    config = whole_run_sides.run_config(args, tmp_path, tmp_path, min_pixels=1)
    trl: dict = whole_run_sides.trl_settings(whole_run_sides.Case(args, tmp_path, config), row_tokens=64)
    assert (trl["per_device_train_batch_size"], trl["gradient_accumulation_steps"]) == (8, 2)
    there = GRPOConfig(output_dir=str(tmp_path), **trl)
    for section, names in EQUAL_SETTINGS.items():
        for name in names.split():
            assert getattr(getattr(config, section), name) == getattr(there, name), name


@pytest.mark.slow
def test_whole_windows_against_trl():
    args = whole_run.parse("--small --num-iterations 2".split())
    result = whole_run.measure(args)
    assert [len(result[kind][side]) for kind in ("seconds", "reward") for side in ("ours", "trl")] == [3] * 4
    # The first completions come from the same weights, with other random numbers.
    assert result["reward"]["ours"][0] == pytest.approx(result["reward"]["trl"][0], abs=0.3)
    for side in ("ours", "trl"):
        assert all(window["rollout"] > 0 and window["training"] > 0 for window in result["seconds"][side])
    assert result["seconds"]["trl"][0]["log-probs"] > 0  # old log-probs, which this project keeps from the first update
    assert result["speedup_vs_peer"] > 0
    assert "trl / ours" in whole_run_tables.whole_run_table([result])
    assert "speedup_vs_peer" in whole_run.table(result)


def test_causal_pairs():
    assert [causal_pairs(n) for n in (1, 2, 3)] == [1, 3, 6]


def test_decode_steps_are_timed_beside_their_products():
    row = decode_row("toy", 2, 3, Workload(image_tokens=16, text_tokens=40, completion_tokens=3, num_generations=1), 1)
    assert row[:2] == ["2 x 3", "56"]
    step, token, least, share = map(float, row[2:6])
    assert token == pytest.approx(step / 6, abs=0.02)
    assert least > 0
    assert 0 < share < 1


def test_flops_of_a_rollout_are_those_that_torch_counts(tmp_path):
    work = Workload(image_tokens=16, text_tokens=40, completion_tokens=6, num_generations=3)
    setup = Setup.build(TOY, work, Training(), tmp_path)
    engine = HFEngine.for_policy(setup.policy(), AutoTokenizer.from_pretrained(setup.checkpoint), max_num_seqs=8)
    engine.stop_token_ids = []
    request = RolloutRequest("group", setup.new_group().group.prompt)
    counted = counted_flops(lambda: engine.generate([request], Sampling(3, 6, temperature=1.0, seed=0)))
    assert rollout_flops(model_config(TOY), work, num_prefills=1) == pytest.approx(counted, rel=0.01)


def test_the_flops_of_a_proof_are_those_that_torch_counts():
    """The CPU kernel of masked attention computes all pairs of tokens. The arithmetic counts the seen ones."""
    found = start_proof.proof_of_shape("toy")
    assert 1.0 < found["flops"] / start_proof.proof_flops(model_config(TOY), start_proof.CHECKED) < 1.15
