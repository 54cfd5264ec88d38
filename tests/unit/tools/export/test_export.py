"""The model card on literals, what is chosen for export, and what is refused."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from torch import zeros

from launch import cli
from rl_vlm.checkpoint import store
from rl_vlm.config.changes import flat_settings
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import CheckpointError, ConfigError, ModelError
from rl_vlm.tools.export import write
from rl_vlm.tools.export.card import Export, for_everyone, model_card
from rl_vlm.tools.export.source import Source, find_source
from rl_vlm.tools.export.write import form_of, refuse_other_content
from rl_vlm.tools.report.read import RunResults
from tests.helpers.run_directory import write_run

HUB_BASE = "Qwen/Qwen2.5-VL-7B-Instruct"
ADAPTER = {
    "base_model_name_or_path": HUB_BASE, "r": 4, "use_dora": False, "modules_to_save": None, "bias": "none",
    "init_lora_weights": True,
}  # fmt: skip


def write_checkpoint(
    run: Path, step: int, max_steps: int = 2, adapter: dict[str, Any] | None = None, **model: Any
) -> Path:
    """Write the files of a checkpoint that a card reads, with the manifest that makes it complete."""
    config = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": HUB_BASE, **model},
            "data": {
                "dataset_name": ["owner/data@train", "/data/private/rows.jsonl"],
                "eval_dataset_name": "held_out.jsonl",
            },
            "rewards": {"reward_funcs": ["exact_match", {"function": "/home_of/me/mine.py:f", "weight": 0.2}]},
            "train": {"learning_rate": 1e-5, "seed": 0},
        }
    )
    unfinished = store.unfinished_path(run, step)
    store.begin(unfinished)
    progress = {"global_step": step, "max_steps": max_steps}
    state = {"progress": progress, "settings": flat_settings(config)}
    (unfinished / "trainer_state.json").write_text(json.dumps(state))
    if adapter:
        (unfinished / "adapter_config.json").write_text(json.dumps(adapter))
        name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
        save_file({name: zeros(4, 4)}, unfinished / "adapter_model.safetensors")
    return store.commit(unfinished, store.file_names(unfinished))


def write_start(run: Path, command: str) -> None:
    start = {
        "command": command, "folder": "/data/me", "device": "H100", "processes": 8,
        "packages": {"rl-vlm": "0.1.0", "transformers": "5.19.0", "pillow": "13"},
    }  # fmt: skip
    (run / "starts.jsonl").write_text(json.dumps(start) + "\n")


def card_of(path: Path, form: Any = "model") -> str:
    return model_card(Export(find_source(path), form, "bfloat16", "export"))


def test_the_card_of_a_complete_run(tmp_path: Path):
    run = write_run(tmp_path / "run")
    write_start(run, "rl-vlm train /data/me/run.yaml hub_token=hf_abcdefghijklmnop micro_batch_tokens=16384")
    (run / "summary.json").write_text('{"checkpoint": "elsewhere/run/checkpoint-2"}')
    write_checkpoint(run, 2)
    card = card_of(run)
    assert ModelCard(card).data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "image-text-to-text", "base_model": HUB_BASE,
        "base_model_relation": "finetune", "datasets": ["owner/data"], "tags": ["grpo", "rl-vlm"],
    }  # fmt: skip
    for line in (
        f"# {HUB_BASE}, trained with GRPO",
        f"This is `{HUB_BASE}` after training of its own weights, in bfloat16.",
        "The run was complete: these are the weights after optimizer step 2 of 2.",
        "| training data | owner/data@train, rows.jsonl |",
        "| reward functions | exact_match (weight 1), mine.py:f (weight 0.2) |",
        "| `train.learning_rate` | 1.0e-05 |",
        "| `train.seed` | 0 |",
        "| Training reward | 0.25 → 0.75 | too few values (1) |",
        "| Held-out exact_match | 0.10 → 0.90 | the latter: 0.00 to 0.50 |",
        "| Reward faults | 1 | of functions on completions |",
        "Held-out figures are over 4 rows, before training and after step 2.",
        "rl-vlm train run.yaml hub_token=*** micro_batch_tokens=16384",
        "On H100, 8 processes, with rl-vlm 0.1.0, transformers 5.19.0.",
        'directory = "export"',
        "print(llm.chat(messages, SamplingParams(max_tokens=512))[0].outputs[0].text)",
    ):
        assert line in card.splitlines(), line
    assert "/data/" not in card and "lora" not in card.lower().replace("loraconfig", "")


def test_the_card_of_an_adapter_names_its_base(tmp_path: Path):
    write_checkpoint(tmp_path, 2, adapter=ADAPTER, use_peft=True, lora_r=4, load_in_4bit=True)
    card = card_of(tmp_path / "checkpoint-2", "adapter")
    assert ModelCard(card).data.to_dict() == {
        "library_name": "peft", "pipeline_tag": "image-text-to-text", "base_model": HUB_BASE,
        "base_model_relation": "adapter", "datasets": ["owner/data"], "tags": ["grpo", "rl-vlm", "lora"],
    }  # fmt: skip
    for line in (
        f"This is a LoRA adapter for `{HUB_BASE}`.",
        "In training, the base was held in 4 bits (nf4).",
        "The code below loads the unquantized base.",
        "| `model.lora_r` | 4 |",
        f'base = AutoModelForImageTextToText.from_pretrained("{HUB_BASE}", dtype="auto")',
        f'llm = LLM("{HUB_BASE}", enable_lora=True, max_lora_rank=8)',
    ):
        assert line in card.splitlines(), line
    assert "The figures of the run are not known here" in card


def test_the_card_of_an_adapter_that_vllm_cannot_load(tmp_path: Path):
    adapter = ADAPTER | {"init_lora_weights": "pissa", "base_model_name_or_path": "/data/models/my-base"}
    write_checkpoint(tmp_path, 2, adapter=adapter, use_peft=True, lora_r=4)
    card = card_of(tmp_path / "checkpoint-2", "adapter")
    assert "vLLM cannot load this adapter: its initialisation (pissa) has changed the base weights." in card
    assert 'The base model is not on the hub: put its directory in place of `"my-base"`.' in card
    assert "base_model" not in ModelCard(card).data.to_dict()


def test_the_card_says_which_step_of_which_run(tmp_path: Path):
    run = write_run(tmp_path / "run")
    first = write_checkpoint(run, 1, max_steps=2)
    (run / "summary.json").unlink()
    card = card_of(first)
    assert re.search(r"\*\*The run was not complete when this was exported\.\*\* .* step 1", card)
    assert re.search(r"\*\*Too short to tell\.\*\* .* the training reward", card)
    assert "| Training reward | 0.25 → 0.25 |" in card
    assert "| Held-out exact_match | 0.10 |" in card
    assert "Held-out figures are over 4 rows, before training." in card
    write_checkpoint(run, 2)
    (run / "summary.json").write_text('{"checkpoint": "run/checkpoint-2"}')
    assert "**These are not the weights that the run ended with.** These are the weights after" in card_of(first)


def test_the_checkpoint_of_a_run_is_that_of_its_summary_or_the_newest_complete_one(tmp_path: Path):
    run = write_run(tmp_path / "run")
    for step in (1, 2, 10):
        write_checkpoint(run, step)
    (run / "checkpoint-10" / "trainer_state.json").write_text("{")
    (run / "summary.json").unlink()
    assert find_source(run).step == 2
    (run / "summary.json").write_text('{"checkpoint": "/data/run/checkpoint-1"}')
    assert find_source(run).step == 1
    shutil.rmtree(run / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"checkpoint-1: .*complete checkpoints in .*run: checkpoint-2"):
        find_source(run)


def test_what_cannot_be_exported_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run")
    (run / "summary.json").unlink()
    for path, message in (
        (tmp_path, "holds neither a run (metrics.jsonl) nor a checkpoint (manifest.json)"),
        (run, "has no complete checkpoint yet"),
        (run / "checkpoint-9", "complete checkpoints in"),
    ):
        assert cli.main(["export", str(path)]) == 2
        assert message in capsys.readouterr().err
    write_checkpoint(run, 1)
    assert cli.main(["export", str(run), "--merge"]) == 2
    assert "checkpoint-1 is not an adapter and has all weights already" in capsys.readouterr().err
    assert cli.main(["export", str(run), "--to", str(run)]) == 2
    assert "exists and is not an earlier export (no export.json)" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path):
    found = write_checkpoint(tmp_path, 2, adapter=ADAPTER, use_peft=True, lora_r=4)
    weights = bytearray((found / "adapter_model.safetensors").read_bytes())
    weights[-1] ^= 1
    (found / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match=r"checkpoint-2: adapter_model.safetensors"):
        write.export(found)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2"]


def test_dtype_is_refused_for_an_adapter(tmp_path: Path):
    source = find_source(write_checkpoint(tmp_path, 2, adapter=ADAPTER, use_peft=True, lora_r=4))
    assert [form_of(source, merge, None) for merge in (False, True)] == ["adapter", "merged"]
    with pytest.raises(ConfigError, match="an adapter stays in float32"):
        form_of(source, False, "bfloat16")


def test_an_export_replaces_an_earlier_one_alone(tmp_path: Path):
    refuse_other_content(tmp_path / "new")
    refuse_other_content(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="choose another directory, the argument `--to`"):
        refuse_other_content(tmp_path)
    (tmp_path / "export.json").write_text("{}")
    refuse_other_content(tmp_path)


def test_a_full_disk_is_named_with_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = write_checkpoint(tmp_path, 2, adapter=ADAPTER, use_peft=True, lora_r=4)
    usage = shutil.disk_usage(tmp_path)._replace(free=2**24)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"the export needs 0\.06 GiB, but 0\.02 GiB are free: make room"):
        write.export(found)
    assert os.listdir(tmp_path) == ["checkpoint-2"]


def test_a_base_folder_that_moved_with_its_run_is_found(tmp_path: Path):
    adapter = ADAPTER | {"base_model_name_or_path": "runs/old/initial_model"}
    found = write_checkpoint(tmp_path, 2, adapter=adapter, use_peft=True, lora_r=4)
    assert find_source(found).base == "runs/old/initial_model"
    (tmp_path / "initial_model").mkdir()
    assert find_source(found).base == str(tmp_path / "initial_model")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rl-vlm train /data/me/run.yaml", "rl-vlm train run.yaml"),
        ("output_dir=/scratch/user/x/ y=2", "output_dir=x y=2"),
        ("'[/a/b/f.py:g, ../c/d.py:h, ~/e/f.py:i]'", "'[f.py:g, ../c/d.py:h, f.py:i]'"),
        ("org/name https://host/v1/x", "org/name https://host/v1/x"),
        ("http://me:pass@host/v1", "http://***@host/v1"),
        ("kwargs: {api_key: sk-123, n: 2}", "kwargs: {api_key: ***, n: 2}"),
        ("wandb_api_key='abc' x_TOKEN=abc --password=p", "wandb_api_key='***' x_TOKEN=*** --password=***"),
        ('{"password": "a b;c", "pin": 1}', '{"password": "***", "pin": 1}'),
        ("Authorization: Bearer abc.def next", "Authorization: *** next"),
        ("https://me:a@b@host/x?api_key=abc&n=2", "https://***@host/x?api_key=***&n=2"),
        ("micro_batch_tokens: auto, stop_token: '<eos>'", "micro_batch_tokens: auto, stop_token: '<eos>'"),
        ("max_tokens=512 importance_sampling_level=token", "max_tokens=512 importance_sampling_level=token"),
        ("hf_" + 17 * "Ab", "***"),
    ],
)
def test_text_for_everyone(text: str, expected: str):
    assert for_everyone(text) == expected


def test_names_that_can_be_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local/data").mkdir(parents=True)
    (tmp_path / "started/rows/train").mkdir(parents=True)
    run = RunResults("run", tmp_path, "training", starts=[{"folder": str(tmp_path / "started")}])
    source = Source(tmp_path, {}, run)
    names = ["owner/data", "gsm8k", "local/data", "rows/train", "rows.jsonl", "/a/b", "a/b/c", "f.py:g", "m:g", "../x"]
    assert [name for name in names if source.is_on_hub(name)] == ["owner/data", "gsm8k"]


def test_an_adapter_keeps_its_weights_and_names_the_revision_of_its_base(tmp_path: Path):
    settings = {"use_peft": True, "lora_r": 4, "model_revision": "v2"}
    source = find_source(write_checkpoint(tmp_path, 2, adapter=ADAPTER, **settings))
    (tmp_path / "out").mkdir()
    write.write_adapter(tmp_path / "out", source)
    written = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"], written["r"]) == (HUB_BASE, "v2", 4)
    weights = [folder / "adapter_model.safetensors" for folder in (tmp_path / "out", tmp_path / "checkpoint-2")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("base", ["/data/models/gone", "gone/away/model"])
def test_a_base_that_is_not_here_cannot_be_merged_into(base: str, tmp_path: Path):
    adapter = ADAPTER | {"base_model_name_or_path": base}
    found = write_checkpoint(tmp_path, 2, adapter=adapter, use_peft=True, lora_r=4)
    with pytest.raises(ModelError, match=rf"the base model {base} of .*checkpoint-2 cannot be loaded"):
        write.export(found, merge=True)
    assert os.listdir(tmp_path) == ["checkpoint-2"]
