"""What `rl-vlm plan` prints, for a model of round numbers."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from rl_vlm.plan import picture
from rl_vlm.plan.build import plan_memory
from rl_vlm.plan.hardware import GIB
from rl_vlm.plan.memory import Phase
from rl_vlm.plan.suggest import Setup
from rl_vlm.plan.text import (
    aligned,
    describe_plan,
    gib,
    not_planned,
    phase_table,
    plan_data,
    setup_data,
    setup_table,
    smallest_table,
    suggested_tables,
)
from tests.helpers.planned_model import hardware, planned_model, run_config

ROOT = Path(__file__).parents[3]
MEMORY = ROOT / "docs" / "memory.md"
RUN = run_config(memory={"micro_batch_tokens": 1024})
MODEL = planned_model(RUN)
MACHINES = hardware(8, gpus=2)
PLAN = plan_memory(RUN, MACHINES, MODEL)
SETUP = Setup({"train.optim": "adafactor"}, MACHINES, PLAN, 2, 2.0)


def test_phases_and_what_is_beside_them():
    phases = [Phase("load", {"weights": 2 * GIB}), Phase("update", {"weights": 2 * GIB, "state": GIB // 2, "none": 0})]
    assert phase_table("GiB", phases, {"CUDA context": GIB, "NCCL buffers": 0}).splitlines() == [
        "GiB           load  update",
        "weights        2.0     2.0",
        "state                  0.5",
        "sum            2.0     2.5",
        "CUDA context   1.0     1.0",
    ]


def test_a_card_is_what_is_planned_and_what_is_not():
    assert sum(not_planned(PLAN).values()) + PLAN.available == MACHINES.card.memory
    assert not_planned(PLAN)["NCCL buffers"] == GIB // 2
    assert not_planned(plan_memory(RUN, hardware(8), MODEL))["NCCL buffers"] == 0


@pytest.mark.parametrize(("size", "text"), [(0, ""), (1, "<0.1"), (GIB, "1.0"), (3000 * GIB // 2, "1,500.0")])
def test_sizes(size: int, text: str):
    assert gib(size) == text


def test_columns_are_aligned():
    assert aligned([["name", "n"], ["a", "1"], ["longer", "10"]], figures=True) == "name     n\na        1\nlonger  10"


def test_the_plan_as_text():
    text = describe_plan(RUN, MACHINES, MODEL, PLAN)
    assert "any: 0.27B weights, 0.27B trained\n2 x a card" in text
    # Of 1,024 tokens 132 are the prompt's and its image's, and a completion has 380.
    assert "Completions of 380 tokens in one micro-batch with their prompt: 2." in text
    assert "it fits" in text
    assert "global batch = 16 per device × 1 accumulation × 2 ranks = 32 completions" in text


def test_the_plan_says_what_it_assumes_of_observations():
    assert "observations" not in describe_plan(RUN, MACHINES, MODEL, PLAN)
    run = run_config(rollout={"tools": ["tools.py:crop"], "max_turns": 4})
    model = replace(MODEL, image_tokens=16)
    plan = plan_memory(run, MACHINES, model)
    text = describe_plan(run, MACHINES, model, plan)
    assert (
        "completions of 380 with observations, of which up to 3 are assumed to have an image as large as the prompt's\n"
    ) in text
    assert plan_data(run, MACHINES, model, plan)["observed_images"] == 3
    text = describe_plan(run, MACHINES, replace(model, num_frames=4), plan)
    assert "of which up to 3 are assumed to have a video as large as the prompt's\n" in text
    edits = run_config(rollout={"tools": ["tools.py:crop"], "max_turns": 4, "keep_images": 1, "edit_every": 2})
    assert "completions of 380 in each of up to 2 contexts, with observations, of which up to 2 are" in describe_plan(
        edits, MACHINES, model, plan
    )


def documented(heading: str) -> set[str]:
    """Return the names in code style of the first column of the table after a line of docs/memory.md."""
    table = MEMORY.read_text().partition(heading)[2].strip().partition("\n\n")[0]
    return {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_keys_of_json_are_documented():
    data = plan_data(RUN, MACHINES, MODEL, PLAN)
    assert documented("The keys of `--json`; sizes are in bytes:") == {*data, "setups", "smallest"}
    row = next(line for line in MEMORY.read_text().splitlines() if line.startswith("| `setups`, `smallest`"))
    assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == set(setup_data(SETUP))
    assert data["micro_batch_tokens"] == 1024
    assert data["completions_per_micro_batch"] == 2
    assert data["vllm_gpu_memory_utilization"] is None
    assert data["global_batch"]["completions_per_step"] == 32
    assert data["peak_bytes"] == max(sum(parts.values()) for parts in data["phases"].values())


def test_the_range_of_vllms_fraction():
    run = run_config(rollout={"engine": "vllm", "max_num_seqs": 16}, vllm={"vllm_gpu_memory_utilization": 0.3})
    plan = plan_memory(run, hardware(20), MODEL)
    found = plan_data(run, hardware(20), MODEL, plan)["vllm_gpu_memory_utilization"]
    # A token's keys and values take 2 x 16 x 8 x 64 x 2 bytes, and a sequence 480 tokens: 15 MiB.
    card = plan.card.memory
    assert found["enough"] - found["least"] == pytest.approx(15 * 15 * 2**20 / card, abs=0.011)
    # All but the peak of the trainer.
    assert found["most"] == pytest.approx((20 - 4.5) * GIB / card, abs=0.01)


def test_set_ups_as_text():
    head, row = setup_table([SETUP]).splitlines()
    assert head.split()[:2] == ["set-up", "GPUs"]
    assert row.startswith("ddp, train.optim=adafactor  1 x 2  ")
    assert row.split()[-2:] == ["2", "1.00"]
    assert smallest_table([SETUP]).startswith("The smallest set-ups that fit:\n")
    assert "64 nodes" in smallest_table([])


def test_what_fits_and_why_comes_first():
    too_large = replace(PLAN, card=replace(PLAN.card, memory=PLAN.card.memory // 8))
    qlora = {"model.load_in_4bit": True, "memory.gradient_checkpointing": False}
    setups = [Setup(qlora, MACHINES, PLAN, 2, 1.0), Setup({}, hardware(1, sharding="zero1_offload"), PLAN, 2, 2.0)]
    lines = suggested_tables([*setups, Setup({}, MACHINES, too_large, 2, 3.0)], too_large).splitlines()
    assert lines[0].startswith("2 of 3 set-ups fit into ")
    assert lines[2].startswith("QLoRA: ddp, model.load_in_4bit=true, memory.gradient_checkpointing=false  1 x 2  ")
    assert lines[5:9] == [
        "Why they fit:",
        "change                   effect",
        "model.load_in_4bit=true  QLoRA: the frozen language model is held in 4 bits",
        "zero1_offload            in host memory: gradients, optimizer state",
    ]
    assert lines[10] == "Set-ups that do not fit, the smallest peak first:"
    assert lines[12].split()[-1] == "3.00"


def test_a_picture_says_first_whether_it_fits():
    assert picture.headline(PLAN) == "It fits: 5.0 of 7.5 GiB"
    too_large = replace(PLAN, card=replace(PLAN.card, memory=PLAN.card.memory // 8))
    assert picture.headline(too_large).startswith("It does not fit: ")
    assert (picture.color_of(PLAN), picture.color_of(too_large)) == ("#14713f", "#b3261e")


def test_labels_of_a_picture_do_not_overlap(tmp_path: Path):
    figure = Figure(figsize=(10, 2.4 + 0.45 * len(PLAN.phases)), layout="constrained")
    axes = figure.subplots()
    picture.draw_phases(PLAN, axes)
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert len(boxes) == len(PLAN.phases)
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]


def test_a_picture_has_the_colours_and_the_fonts_of_the_report():
    css = (ROOT / "rl_vlm/tools/report/page.css").read_text().partition("@media")[0]
    colors = [*picture.COLORS, picture.TEXT, picture.QUIET, picture.LINE, picture.GOOD, picture.BAD]
    assert [color for color in colors if color not in css] == []
    assert [name for name in picture.FONTS if name not in (ROOT / "rl_vlm/tools/report/page.css").read_text()] == []


def test_a_picture(tmp_path: Path):
    picture.draw_plan(PLAN, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
