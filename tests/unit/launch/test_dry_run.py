"""A dry run finds what can be found without the model, all at once, and imports neither torch nor transformers."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet

from launch import cli

ROWS: list[dict[str, Any]] = [{"prompt": f"Question {i}", "solution": str(i)} for i in range(3)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with data, a reward function, a checkpoint's files and a run that passes."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("rewards_of_mine.py").write_text("def likes(completions, solution):\n    return [1.0 for _ in completions]\n")
    write_checkpoint(Path("model"), {"config.json": {"model_type": "qwen2_5_vl"}})
    Path("run.yaml").write_text(
        "model: {model_name_or_path: model}\n"
        "data: {dataset_name: rows.jsonl, eval_dataset_name: rows.jsonl, text_only: true}\n"
        "rewards: {reward_funcs: [exact_match, 'rewards_of_mine.py:likes']}\n"
        "train: {output_dir: run, prompts_per_step: 1}\n"
    )
    return tmp_path


def write_checkpoint(folder: Path, files: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "model.safetensors").touch()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def comments(text: str, start: str) -> list[str]:
    return [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]


def test_without_bitsandbytes_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert cli.main(["train", "run.yaml", "--dry-run", "use_peft=true", "load_in_4bit=true"]) == 2
    assert "pip install -e '.[bitsandbytes]'" in capsys.readouterr().err


def test_what_is_checked_and_what_is_not(capsys):
    assert cli.main(["train", "run.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert comments(printed, "# Checked: ") == [
        "reward functions exact_match, likes.",
        "train data rows.jsonl: 3 rows, of which the first was read.",
        "eval data rows.jsonl: 3 rows, of which the first was read.",
        "length: 3 optimizer steps.",
        "output directory run.",
        "model model: its config.",
    ]
    assert comments(printed, "# Not checked: ") == []
    assert not Path("run").exists()


def test_a_loss_of_ones_own_is_loaded_and_not_called(capsys):
    Path("my.py").write_text("def loss(ratio_NK, inputs, algorithm):\n    raise RuntimeError\n")
    assert cli.main(["train", "run.yaml", "--dry-run", "loss_type=my.py:loss"]) == 0
    printed = capsys.readouterr().out
    assert "token loss my.py:loss." in comments(printed, "# Checked: ")
    assert comments(printed, "# Not checked: ") == ["what the token loss returns."]
    Path("my_other.py").write_text("def loss(ratio_NK):\n    raise RuntimeError\n")
    assert "algorithm.loss_type 'my_other.py:loss' cannot be called as" in problem(capsys, "loss_type=my_other.py:loss")


def test_names_of_the_hub_are_not_checked(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "nowhere")
    overrides = ["model_name_or_path=owner/model", "dataset_name=owner/data"]
    assert cli.main(["train", "run.yaml", "--dry-run", *overrides]) == 0
    data, model = comments(capsys.readouterr().out, "# Not checked: ")
    assert data.startswith("train data: owner/data ")
    assert model == "model owner/model, which is neither a directory here nor in the cache of the hub."


def test_all_problems_are_reported_at_once(capsys):
    overrides = [
        "reward_funcs=[nonsense, nowhere.py:f, numeric]", "dataset_name=nowhere.jsonl", "eval_dataset_name=a/b/c",
        "model_name_or_path=./nowhere", "output_dir=run.yaml/x", "num_generations=1",
    ]  # fmt: skip
    assert cli.main(["train", "run.yaml", "--dry-run", *overrides]) == 2
    printed = capsys.readouterr()
    named = [
        "`rollout.num_generations` is 1", "reward function 'nonsense'", "reward function 'nowhere.py", "nowhere.jsonl",
        "a/b/c does not exist", "train.output_dir run.yaml/x", "model.model_name_or_path ./nowhere does not exist",
    ]  # fmt: skip
    for problem, name in zip(printed.err.splitlines()[1:], named, strict=True):
        assert problem.startswith(name)
    assert "model_name_or_path: ./nowhere" in printed.out  # the resolved run is printed all the same


def problem(capsys, *overrides: str, command: str = "train") -> str:
    """The one problem of a dry run."""
    assert cli.main([command, "run.yaml", "--dry-run", *overrides]) == 2
    _, *lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_reward_that_needs_a_column_that_is_not_there(capsys):
    Path("rewards_of_mine.py").write_text("def wants(completions, gold):\n    return completions\n")
    found = problem(capsys, "reward_funcs=rewards_of_mine.py:wants")
    assert found == "reward function 'wants' needs a column 'gold'; the data has: solution"


@pytest.mark.parametrize(
    "config", [{"max_position_embeddings": 512}, {"text_config": {"max_position_embeddings": 512}}]
)
def test_completions_that_are_longer_than_the_model_takes(capsys, config: dict[str, Any]):
    write_checkpoint(Path("short"), {"config.json": {"model_type": "qwen2_5_vl"} | config})
    model = "model_name_or_path=short"
    assert problem(capsys, model, "max_completion_length=512").startswith("rollout.max_completion_length 512 ")
    assert cli.main(["train", "run.yaml", "--dry-run", model, "max_completion_length=511"]) == 0


def test_the_length_of_a_model_whose_config_is_packaged(capsys):
    found = problem(capsys, "model_name_or_path=Qwen/Qwen2.5-VL-7B-Instruct", "max_completion_length=128000")
    assert "the model takes 128000 tokens" in found


JUDGE = {"base_url": "http://127.0.0.1:9", "model": "critic"}


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("judge", {}, "`base_url` must be the address of a server"),
        ("judge", JUDGE | {"base_url": "localhost:8000"}, "`base_url` must be the address of a server"),
        ("judge", JUDGE | {"scale": 0}, "`scale` must be a finite number above 0"),
        ("judge", JUDGE | {"scale": "ten"}, "`scale` is 'ten': it should be a valid number"),
        ("judge", JUDGE | {"max_calls": -1}, "`max_calls` must be 0 or more"),
        ("judge", JUDGE | {"max_calls": 2.5}, "`max_calls` is 2.5: it should be a valid integer"),
        ("judge", JUDGE | {"prompt": "Judge {response}."}, "`prompt` must be a template with the field {completion}"),
        ("judge", JUDGE | {"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY, which is not set"),
        ("reward_model", {}, "needs `model` in its kwargs"),
        ("reward_model", {"model": "./nowhere"}, "`model` is './nowhere', which is neither a folder nor a name"),
        ("reward_model", {"model": "."}, "the folder . holds no model (config.json)"),
        ("overlong", {}, "needs `max_completion_length`"),
        ("overlong", {"max_completion_length": "8"}, "`max_completion_length` is '8': it should be a valid integer"),
        ("json_schema", {}, "needs `schema`"),
        ("json_schema", {"schema": {"type": "nonsense"}}, "`schema` is invalid at $.type"),
        ("numeric", {"rel_tol": -0.1}, "`rel_tol` is -0.1; a tolerance is a finite number of 0 or more"),
        ("numeric", {"abs_tol": ".inf"}, "`abs_tol` is '.inf': it should be a valid number"),
        ("language", {"language": "english"}, "language='english'"),
        ("format_tags", {"tags": []}, "`tags` is []; it must be one or more different names of tags"),
        ("format_tags", {"tags": ["answer", "answer"]}, "`tags` is ['answer', 'answer']"),
        ("format_tags", {"tags": ["<answer>"]}, "`tags` is ['<answer>']"),
        ("format_tags", {"tags": "answer"}, "`tags` is 'answer': "),
        ("format_tags", {"allow_outside": "yes"}, "`allow_outside` is 'yes': it should be a valid boolean"),
        ("choice", {"letters": "AAB"}, "letters='AAB' must be two or more different letters"),
        ("short_answer", {"metric": "f2"}, "`metric` is 'f2': it should be 'exact' or 'f1'"),
        ("iou", {"coordinates": "pixels"}, "`coordinates` is 'pixels': it should be 'absolute'"),
    ],
)
def test_a_built_in_with_a_setting_that_it_cannot_use(capsys, function, settings, message):
    entry = json.dumps([{"function": function, "kwargs": settings}])
    found = problem(capsys, f"reward_funcs={entry}")
    assert found.startswith(f"reward function '{function}': ") and message in found


@pytest.mark.parametrize(
    ("function", "settings", "largest"),
    [
        ("exact_match", {}, "1"),
        ("reward_model", {"model": "owner/model", "sigmoid": True}, "1"),
        ("cosine_length", {"max_value_correct": 2.5}, "2.5"),
    ],
)
def test_a_score_that_a_built_in_cannot_reach(capsys, function, settings, largest):
    entry = {"function": function, "kwargs": settings, "solved_from": 3}
    found = problem(capsys, f"reward_funcs={json.dumps([entry])}")
    assert f"solved_from 3, but its largest score is {largest}: no completion would count as solved" in found


def test_scores_that_built_ins_can_reach(capsys):
    entries = [
        {"function": "reward_model", "kwargs": {"model": "owner/model"}, "solved_from": 3},
        {"function": "cosine_length", "kwargs": {"max_value_correct": 3.0}, "solved_from": 3},
        {"function": "rewards_of_mine.py:likes", "solved_from": 3},
        "exact_match",
    ]
    assert cli.main(["train", "run.yaml", "--dry-run", f"reward_funcs={json.dumps(entries)}"]) == 0


def test_a_template_that_cannot_be_filled(capsys):
    assert "data.prompt_template '{question}' cannot be filled" in problem(
        capsys, "prompt_template='{question}'", "eval_dataset_name=null"
    )


def test_an_image_that_is_not_there(capsys):
    Path("images.jsonl").write_text(json.dumps(ROWS[0] | {"image": "nowhere.png"}) + "\n")
    overrides = ["dataset_name=images.jsonl", "eval_dataset_name=null", "text_only=false"]
    assert "images.jsonl, row 0, column image" in problem(capsys, *overrides)


def test_data_without_images(capsys):
    assert "no row has an image" in problem(capsys, "eval_dataset_name=null", "text_only=false")


def test_an_optimizer_whose_package_is_missing(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install -e '.[bitsandbytes]'" in problem(capsys, "optim=adamw_8bit")


def test_fewer_rows_than_a_window(capsys):
    assert "have 3 rows, fewer than the 4 prompts" in problem(capsys, "prompts_per_step=4")


def test_a_directory_with_an_earlier_run(capsys):
    Path("run").mkdir()
    Path("run/metrics.jsonl").touch()
    assert "train.output_dir run holds an earlier run" in problem(capsys)
    assert cli.main(["train", "run.yaml", "--dry-run", "overwrite_output_dir=true"]) == 0
    assert cli.main(["eval", "run.yaml", "--dry-run"]) == 0


def test_a_checkpoint_to_resume_that_is_not_there(capsys):
    assert "resume_from_checkpoint run/checkpoint-4 is not a directory" in problem(
        capsys, "resume_from_checkpoint=run/checkpoint-4"
    )


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            {"config.json": {"model_type": "llama"}},
            "bad has model_type 'llama', which is not supported: config.json has no part for a vision tower",
        ),
        ({}, "bad/config.json cannot be read"),
        ({"config.json": [1]}, "bad/config.json holds no JSON object"),
        ({"adapter_config.json": {"base_model_name_or_path": "./nowhere"}}, "./nowhere does not exist"),
        ({"adapter_config.json": {"base_model_name_or_path": "model"}}, None),
    ],
)
def test_files_of_a_checkpoint(capsys, files, found):
    write_checkpoint(Path("bad"), files)
    if found is None:
        assert cli.main(["train", "run.yaml", "--dry-run", "model_name_or_path=bad"]) == 0
    else:
        assert found in problem(capsys, "model_name_or_path=bad")


def test_a_checkpoint_without_weights(capsys):
    Path("model/model.safetensors").unlink()
    assert "model holds no weights" in problem(capsys)


def test_a_revision_of_a_local_model(capsys):
    assert "model.model_revision 'v2' has no effect on model" in problem(capsys, "model_revision=v2")


def test_checkpoints_to_evaluate(capsys):
    assert cli.main(["eval", "run.yaml", "--dry-run", "--checkpoint", "model", "--checkpoint", "./other"]) == 2
    assert "./other does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--by", "sauce"], "--by sauce: the data's columns of text and numbers are solution"),
        (["--keep", "0.1..0.9", "--keep-by", "choice"], "--keep-by choice: no reward function has that name"),
        (["--keep", "0.1..0.9"], "--keep: the reward functions exact_match, likes have the same weight"),
        (["--keep-by", "likes"], "--keep-by likes has no effect without --keep"),
        (
            ["--checkpoint", "model", "--checkpoint", "model/"],
            "--checkpoint names a checkpoint twice: model, model/",
        ),
    ],
)
def test_options_of_an_evaluation(capsys, flags, message):
    assert cli.main(["eval", "run.yaml", "--dry-run", *flags]) == 2
    assert message in capsys.readouterr().err
    fine = ["--by", "solution", "--keep", "0..1", "--keep-by", "likes", "--checkpoint", "model"]
    assert cli.main(["eval", "run.yaml", "--dry-run", *fine]) == 0


def test_a_warm_up_that_is_longer_than_the_run(capsys):
    assert cli.main(["train", "run.yaml", "--dry-run", "warmup_steps=4"]) == 0
    (warning,) = comments(capsys.readouterr().out, "# Warning: ")
    assert warning.startswith("train.warmup_steps 4 is longer than the run of 3 optimizer steps")
    assert cli.main(["train", "run.yaml", "--dry-run", "warmup_steps=3"]) == 0
    assert comments(capsys.readouterr().out, "# Warning: ") == []


def test_a_folder_of_images_that_is_not_there(capsys):
    found = problem(capsys, "image_root=nowhere", "eval_dataset_name=null")
    assert found == "rows.jsonl: data.image_root nowhere is no directory; name the folder of its images."


def test_a_key_that_a_row_has_twice(capsys):
    Path("twice.jsonl").write_text(
        '{"prompt": "a", "solution": "1"}\n{"prompt": "b", "solution": "1", "solution": "2"}\n'
    )
    found = problem(capsys, "dataset_name=twice.jsonl", "eval_dataset_name=null")
    assert found == "twice.jsonl, line 2: not JSON: key `solution` is given twice"


def test_a_served_model_is_not_checked(capsys):
    overrides = ["model_name_or_path=./served", "endpoint_url=http://a:1/v1"]
    assert cli.main(["eval", "run.yaml", "--dry-run", *overrides]) == 0
    assert comments(capsys.readouterr().out, "# Not checked: ") == ["model ./served, which http://a:1/v1 serves."]


def test_a_function_that_writes_a_model(capsys):
    Path("maker.py").write_text("def make(directory, seed):\n    raise SystemExit('called')\n")
    assert cli.main(["train", "run.yaml", "--dry-run", "model_name_or_path=maker.py:make"]) == 0
    assert "model that maker.py:make writes." in comments(capsys.readouterr().out, "# Not checked: ")
    assert "has no function 'mak'" in problem(capsys, "model_name_or_path=maker.py:mak")


def test_parquet_and_saved_data_are_opened(capsys):
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), "rows.parquet")
    Dataset.from_list(ROWS).save_to_disk("one")
    DatasetDict({"dev": Dataset.from_list(ROWS[:2])}).save_to_disk("several")
    data = ["dataset_name=one", "eval_dataset_name=several", "dataset_test_split=dev"]
    assert cli.main(["train", "run.yaml", "--dry-run", *data]) == 0
    printed = capsys.readouterr().out
    assert "# Checked: train data one: 3 rows" in printed and "# Checked: eval data several: 2 rows" in printed
    assert cli.main(["train", "run.yaml", "--dry-run", "dataset_name=rows.parquet"]) == 0
    assert "# Checked: train data rows.parquet: 3 rows" in capsys.readouterr().out
    assert "several has no split 'test'; it has dev." in problem(capsys, "eval_dataset_name=several")
    assert "one has no splits, so data.dataset_train_split 'x' has no effect" in problem(
        capsys, "dataset_name=one", "dataset_train_split=x"
    )


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")
def test_servers_need_only_their_model(capsys):
    assert cli.main(["serve", "run.yaml", "--dry-run", "dataset_name=null", "eval_dataset_name=null"]) == 0
    assert problem(capsys, "model_name_or_path=./nowhere", command="serve").startswith("model.model_name_or_path")


@pytest.mark.parametrize("variables", [{}, {"ACCELERATE_USE_DEEPSPEED": "true"}], ids=["alone", "DeepSpeed"])
def test_a_dry_run_imports_no_torch(variables: dict[str, str]):
    program = (
        "import sys; from launch.cli import main\n"
        "assert main(['train', 'run.yaml', '--dry-run']) == 0\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'accelerate', 'peft', 'vllm'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | variables)
    assert run.stdout.splitlines()[-1] == "[]"


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
LORA = ["use_peft=true", "prompts_per_step=2"]


@pytest.mark.parametrize(
    ("variables", "sharding", "settings"),
    [
        (FSDP2, "fsdp2", [*LORA, "load_in_4bit=true"]),
        (ZERO, "zero3", [*LORA, "init_lora_weights=pissa"]),
        (ZERO, "zero3", [*LORA, "load_in_4bit=true", "optim=adafactor"]),
        ({}, "ddp", ["prompts_per_step=3"]),
        ({}, "ddp", ["prompts_per_step=2", "engine=vllm", "vllm_tensor_parallel_size=3"]),
    ],
)
def test_what_the_plan_refuses_is_refused_under_the_launch_variables(
    capsys, monkeypatch, variables: dict[str, str], sharding: str, settings: list[str]
):
    hardware = ["--sharding", sharding, "--gpus", "2", "--gpu-memory", "80GB"]
    assert cli.main(["plan", "run.yaml", *settings, *hardware]) == 2
    refused = capsys.readouterr().err.partition(" failed:\n")[2].splitlines()
    assert all(sharding in line for line in refused) or not variables
    for name, value in (variables | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "run.yaml", "--dry-run", *settings]) == 2
    found = capsys.readouterr().err.partition(" failed:\n")[2].splitlines()
    assert refused and [line for line in found if "not installed" not in line] == refused


def test_the_sharding_of_a_launch_is_checked(capsys, monkeypatch):
    for name, value in (ZERO | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "run.yaml", "--dry-run", "prompts_per_step=2"]) == 0
    assert "sharding zero3 on 2 processes." in comments(capsys.readouterr().out, "# Checked: ")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FSDP_VERSION", "1", "fsdp_config.fsdp_version is 1"),
        (
            "ACCELERATE_MIXED_PRECISION",
            "bf16",
            "the launcher asks for mixed_precision bf16, but model",
        ),
    ],
)
def test_a_launch_that_contradicts_the_run(capsys, monkeypatch, name: str, value: str, message: str):
    for variable, given in (FSDP2 | {name: value}).items():
        monkeypatch.setenv(variable, given)
    assert problem(capsys, "dtype=float32").startswith(message)


def test_an_evaluation_is_not_sharded(capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert "an evaluation does not shard the model" in problem(capsys, command="eval")
