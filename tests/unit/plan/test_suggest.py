"""Suggested set-ups of a model of round numbers; nothing is traced."""

from pathlib import Path

import pytest

from rl_vlm.config.load import load_config
from rl_vlm.config.schema import RunConfig
from rl_vlm.plan import suggest
from rl_vlm.plan.build import plan_memory
from rl_vlm.plan.hardware import GIB, Hardware
from rl_vlm.plan.suggest import Models, Setup, more_gpus, setup, setups, smallest, with_changes
from tests.helpers.planned_model import hardware, planned_model, run_config

CHECKPOINTING = {"memory.gradient_checkpointing": True}
LORA = CHECKPOINTING | {"model.use_peft": True, "model.freeze_vision_tower": True}
QLORA = LORA | {"model.load_in_4bit": True, "rollout.engine": "hf"}


@pytest.fixture(autouse=True)
def traced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggest, "inspect_model", planned_model)
    monkeypatch.setattr(suggest, "with_weights", lambda config, model: planned_model(config))


def models_of(config: RunConfig) -> Models:
    return Models(config, planned_model(config))


def found_setups(config: RunConfig, machines: Hardware) -> list[Setup]:
    return setups(config, machines, models_of(config))


def by_name(config: RunConfig, machines: Hardware) -> dict[str, Setup]:
    return {each.name: each for each in found_setups(config, machines)}


def test_what_fits_comes_first_by_time():
    # 4 GiB, and 512 tokens of 1 MiB: with half of them, or with less optimizer state, it fits.
    found = found_setups(run_config(), hardware(4.4))
    fits = [each.plan.fits for each in found]
    assert fits == sorted(fits, reverse=True)
    times = [each.seconds for each in found if each.plan.fits]
    assert times == sorted(times)
    assert {each.name for each in found if each.plan.fits} >= {
        "ddp, memory.gradient_checkpointing=true", "ddp, train.optim=adamw_8bit", "ddp, train.optim=adafactor",
        "ddp, model.freeze_vision_tower=true", "ddp, memory.activation_offloading=true",
    }  # fmt: skip
    assert "ddp" in {each.name for each in found if not each.plan.fits}


def test_set_ups_with_more_of_a_group_at_once_come_first():
    # Beside 4 GiB there are 1.5 GiB. A token takes 1 MiB, and a prompt 132 tokens: three completions of 380.
    found = found_setups(run_config(memory={"micro_batch_tokens": "auto"}), hardware(5.5))
    together = {each.name: each.together for each in found}
    assert (together["ddp"], together["ddp, memory.gradient_checkpointing=true"]) == (3, 4)
    seconds = {each.name: each.seconds for each in found}
    assert seconds["ddp, memory.gradient_checkpointing=true"] > seconds["ddp"] > seconds["ddp, train.optim=adamw_8bit"]
    places = [
        [each.name for each in found].index(f"ddp{change}")
        for change in (", train.optim=adamw_8bit", ", memory.gradient_checkpointing=true", "")
    ]
    assert places == sorted(places)


def test_peaks_of_the_savings():
    found = by_name(run_config(), hardware(80))
    peaks = {
        name: each.plan.peak.total / GIB
        for name, each in found.items()
        if each.hardware.sharding.name == "ddp" and "rollout.engine" not in each.changes  # whose cache is a stage more
    }
    assert peaks == pytest.approx(
        {
            "ddp": 4.5,
            "ddp, memory.gradient_checkpointing=true": 4.25 + 16 / 1024,  # an image is 64 tokens instead of 32
            "ddp, train.optim=adamw_8bit": 3.008,  # moments of 2.03 instead of 8 bytes
            "ddp, train.optim=adafactor": 2.504,
            "ddp, model.freeze_vision_tower=true": 4 * 0.75 + 0.125 + 0.5 + 5 * 32 / 1024,  # 5 images at once
            "ddp, memory.activation_offloading=true": 4.125,
            "LoRA: ddp, model.use_peft=true, model.freeze_vision_tower=true": 0.5 + 4 / 64 + 0.5 + 5 * 32 / 1024,
        },
        abs=0.03,
    )


def test_times_of_the_savings():
    """Of 8 prompts with 100 + 4 x 190 tokens, on an A100's peak."""
    seconds = {name: each.seconds for name, each in by_name(run_config(), hardware(80)).items()}
    tokens, weights = 8 * (100 + 4 * 190), GIB / 4
    product = 2 * weights * tokens / (0.4 * 312e12)
    update = 28 * weights / 2e12
    assert seconds["ddp"] == pytest.approx(3 * product + update, rel=1e-3)
    assert seconds["ddp, memory.gradient_checkpointing=true"] == pytest.approx(4 * product + update, rel=1e-3)
    # Layers keep 3/4 MiB of a token and 1/4 MiB of a patch, which go to host memory and back over 25 GB/s.
    copied = 2 * 2**20 * (0.75 * tokens + 0.25 * 8 * 64) / 25e9
    offloaded = seconds["ddp, memory.activation_offloading=true"]
    assert offloaded == pytest.approx(3 * product + update + copied, rel=1e-3)
    assert seconds["ddp, train.optim=adamw_8bit"] - seconds["ddp"] == pytest.approx(
        -2 * 5.97 * weights / 2e12, rel=0.01
    )


@pytest.mark.parametrize(("weight_sync_steps", "copies"), [(1, 0), (2, 2)])
def test_sleep_mode_frees_memory_and_copies_weights_that_are_not_sent_again(weight_sync_steps: int, copies: int):
    rollout = {"engine": "vllm", "weight_sync_steps": weight_sync_steps}
    run = run_config(rollout=rollout, vllm={"vllm_gpu_memory_utilization": 0.3})
    found = by_name(run, hardware(20))
    awake, asleep = found["ddp"], found["ddp, vllm.vllm_enable_sleep_mode=true"]
    assert awake.plan.rollouts.while_training == round(0.3 * awake.plan.card.memory)
    assert asleep.plan.peak.total < awake.plan.peak.total
    assert asleep.seconds - awake.seconds == pytest.approx(copies * (GIB / 2) / 25e9, rel=1e-3)  # in bfloat16


@pytest.mark.parametrize("sleeps", [False, True])
def test_another_fraction_for_vllm_is_tried(sleeps: bool):
    vllm = {"vllm_gpu_memory_utilization": 0.95, "vllm_enable_sleep_mode": sleeps}
    run = run_config(rollout={"engine": "vllm", "max_num_seqs": 8}, vllm=vllm)
    found = setup(run, {}, hardware(12), models_of(run))
    assert found is not None
    assert found.plan.fits
    assert 0.05 < found.changes["vllm.vllm_gpu_memory_utilization"] < 0.7
    assert "memory.micro_batch_tokens" not in found.changes


def test_smaller_micro_batches_are_tried():
    run = run_config(memory={"micro_batch_tokens": 4096})
    found = setup(run, {}, hardware(6), models_of(run))
    assert found is not None
    assert found.plan.fits
    assert 2000 < found.changes["memory.micro_batch_tokens"] <= 2048  # 2 GiB beside 4 GiB


def test_qlora_is_one_of_the_savings():
    found = by_name(run_config(rollout={"engine": "vllm"}), hardware(80))
    names = {name.partition(" ")[0] for name in found}
    assert {"LoRA:", "QLoRA:"} <= names
    qlora = next(each for name, each in found.items() if name.startswith("QLoRA: ddp"))
    assert qlora.changes == {
        "model.use_peft": True, "model.freeze_vision_tower": True, "model.load_in_4bit": True, "rollout.engine": "hf",
    }  # fmt: skip
    run = run_config(model={"use_peft": True}, rollout={"engine": "hf"})
    assert "QLoRA: ddp, model.load_in_4bit=true" in by_name(run, hardware(80))


def test_savings_that_a_run_refuses_are_left_out():
    found = by_name(run_config(), hardware(80, gpus=2))
    assert {each.hardware.sharding.name for name, each in found.items() if "adafactor" in name} == {"ddp"}
    qlora = run_config(model={"use_peft": True, "load_in_4bit": True}, rollout={"engine": "hf"})
    assert not any(each.hardware.sharding.shards_weights for each in found_setups(qlora, hardware(80, gpus=2)))


def test_the_smallest_set_ups():
    run = run_config()
    found = smallest(run, hardware(1.6), models_of(run))
    sizes = [(each.changes, each.hardware.gpus) for each in found]
    assert all(each.plan.fits for each in found)
    assert sizes[0][1] == min(size for _, size in sizes)
    assert len({size for _, size in sizes}) == len(sizes)
    assert smallest(run, hardware(0.01), models_of(run)) == []


def test_what_is_trained_is_kept_if_it_fits():
    run = run_config()
    found = smallest(run, hardware(4.4), models_of(run))
    assert [(each.changes, each.hardware.gpus) for each in found] == [(CHECKPOINTING, 1)]


def sizes(machines: Hardware, below: int | None = None) -> list[tuple[int, int]]:
    return [(each.gpus, each.nodes) for each in more_gpus(machines, below)]


def test_larger_hardware():
    assert sizes(hardware(1, gpus=6)) == [(6, 1), (8, 1), (8, 2), (8, 4), (8, 8), (8, 16), (8, 32), (8, 64)]
    assert sizes(hardware(1), below=16) == [(1, 1), (2, 1), (4, 1), (8, 1)]
    assert sizes(hardware(1, gpus=8, nodes=100)) == [(8, 100)]
    assert sizes(hardware(1, gpus=16, nodes=32)) == [(16, 32), (16, 64)]


def test_prompts_are_enough_for_larger_hardware():
    assert suggest.more_prompts(run_config(), hardware(1, gpus=8, nodes=2)) == {"train.prompts_per_step": 16}
    assert suggest.more_prompts(run_config(), hardware(1, gpus=4)) == {}


def test_settings_without_effect_are_left_out_of_a_change():
    vllm = {"vllm_gpu_memory_utilization": 0.96, "vllm_enable_sleep_mode": True}
    run = run_config(
        model={"trainable_modules": ["language_model"]},
        rollout={"engine": "vllm", "weight_sync_steps": 2},
        vllm=vllm,
        algorithm={"vllm_importance_sampling_clip_max": 2.0},
        train={"adam_beta2": 0.99},
    )
    *_, qlora = suggest.adapters(run)
    changed = with_changes(run, qlora)
    name = Setup(qlora, hardware(80), plan_memory(changed, hardware(80), planned_model(changed)), 1, 1.0).name
    assert "model.trainable_modules=null, " in name and "model.use_peft=true, " in name
    assert (changed.model.load_in_4bit, changed.model.trainable_modules, changed.rollout.engine) == (True, None, "hf")
    assert "adam_beta2" not in with_changes(run, {"train.optim": "adafactor"}).train.model_fields_set


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=str)
def test_each_saving_is_tried_for_the_ready_files(path: Path):
    config = load_config(path, ["model_name_or_path=a"])
    for changes in suggest.savings(config):
        with_changes(config, changes)


def test_changes_that_contradict_the_settings_are_no_set_up():
    run = run_config(algorithm={"beta": 0.1, "sync_ref_model": True})
    assert setup(run, LORA, hardware(80), models_of(run)) is None
