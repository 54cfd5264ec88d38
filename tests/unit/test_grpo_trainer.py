"""The settings that `GRPOTrainer` makes of functions and data in memory, and what it refuses."""

import inspect
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from PIL import Image

import rl_vlm
from rl_vlm.algorithm.own_loss import check_own_loss
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.load import load_config
from rl_vlm.config.schema import RunConfig
from rl_vlm.config.trl_refused import NOT_CALLED
from rl_vlm.config.trl_trainer import reason_without
from rl_vlm.data.samples import load_rows
from rl_vlm.distributed.signals import stop
from rl_vlm.errors import ConfigError, DataError
from rl_vlm.functions import live, load_function
from rl_vlm.grpo_trainer import GRPOTrainer
from rl_vlm.passes.allocator import VARIABLES
from rl_vlm.reward.suite import RewardSuite
from tests.helpers.tiny_run import token_sum

ROWS = [{"prompt": "Which digit?", "image": Image.new("RGB", (4, 3)), "solution": "1"}, {"prompt": "And this?"}]
NAME = re.compile(r"python:[\w<>]+#[0-9a-f]{12}")


def trainer(**given: Any) -> GRPOTrainer:
    return GRPOTrainer(**{"model": "some/model", "prompts_per_step": 2, **given})


def test_it_is_imported_lazily():
    program = (
        "import sys, rl_vlm; print('rl_vlm.grpo_trainer' in sys.modules); from rl_vlm import GRPOTrainer; "
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n[]\n"
    assert rl_vlm.GRPOTrainer is GRPOTrainer and rl_vlm.__all__ == ["GRPOTrainer"]
    with pytest.raises(AttributeError, match="module 'rl_vlm' has no attribute 'Trainer'"):
        _ = rl_vlm.Trainer  # pyright: ignore[reportAttributeAccessIssue]


def half(ratio_NK: Any, inputs: Any, algorithm: Any) -> Any:
    return -0.5 * ratio_NK * inputs.advantages_NK, {}


def reward(completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize("key", ["loss_type", "algorithm.loss_type"])
def test_the_loss_can_be_a_function(key: str):
    made = trainer(**{key: half, "epsilon": 0.1})  # a function in memory has no source to look for settings in
    name = made.config.algorithm.loss_type
    assert NAME.fullmatch(name) and name.startswith("python:half#") and made.objects[name] is half
    with live(made.objects):
        check_own_loss(made.config.algorithm)
    assert trainer(loss_type="grpo").config.algorithm.loss_type == "grpo"


def test_settings_are_keywords_by_their_names(tmp_path: Path):
    config = trainer(learning_rate=1e-3, num_generations=4, output_dir=tmp_path, use_peft=True, bf16=True).config
    assert (config.train.learning_rate, config.rollout.num_generations, config.train.output_dir) == (
        1e-3, 4, str(tmp_path),
    )  # fmt: skip
    assert (config.model.use_peft, config.model.dtype, config.train.num_train_epochs) == (True, "bfloat16", 1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rte": 1e-3}, "GRPOTrainer: unknown setting `learning_rte`; the closest is `train.learning_rate`"),
        ({"learning_rate": -1.0}, "GRPOTrainer: `train.learning_rate` is -1.0: it should be greater than or equal"),
        ({"args": {"learning_rte": 1}}, "args: unknown setting `learning_rte`"),
        ({"args": 3}, "args is a int: give a YAML file, a dict, or a GRPOConfig of TRL"),
        ({"peft_config": object()}, "peft_config is a object: give a LoraConfig of PEFT, or use_peft=True"),
        ({"quantization_config": object()}, "GRPOTrainer: unknown setting `quantization_config`; write `load_in_4bit"),
        ({"train_dataset": ROWS, "dataset_name": "other"}, "both set `data.dataset_name`"),
        ({"model": None}, r"`model\.model_name_or_path` is not set"),
        ({"model": torch.nn.Linear(1, 1)}, "model is a Linear, which has no save_pretrained: give a model of transf"),
        (
            {"callbacks": [print]},
            "the callback is a builtin_function_or_method: give a TrainerCallback of transformers",
        ),
        ({"processing_class": object()}, "processing_class is a object without an image processor: give the processor"),
        ({"model": torch.nn.Linear}, "model is the class Linear: give a hub name, a directory or a function"),
        (
            {"train_dataset": ROWS, "data.dataset_name": "other"},
            "`data.dataset_name` is given in args and as an argument",
        ),
        ({"train_dataset": ROWS, "data": {"dataset_name": "other"}}, "`data.dataset_name` is set to 'other' and 'pyth"),
        ({"train": {"seed": 3}, "train.seed": 4}, "GRPOTrainer: `train.seed` is set to 3 and 4; keep one"),
        ({"reward_funcs": [lambda c: 1, lambda c: 2]}, "two reward functions are called <lambda>: give them names"),
        ({"reward_funcs": [partial(token_sum, a=1), token_sum]}, "two reward functions are called token_sum"),
        (
            {"reward_funcs": {"function": token_sum, "name": "completion"}},
            "cannot be called 'completion': the name has a slash, or the run uses it for a column",
        ),
        ({"reward_funcs": reward}, "cannot be called 'reward': .*; give it another `name`"),
        ({"train_dataset": {"train": ROWS, "test": ROWS}}, "train_dataset has several splits, train, test: give one"),
        ({"tools": [{"name": "crop"}]}, "tools has a dict: give a callable, or its name"),
        ({"environment_factory": 3}, "environment_factory has a int: give a callable, or its name"),
        ({"environment_factory": str, "environment": "a.py:A"}, "both set `rollout.environment`"),
        ({"rollout_func": token_sum}, "GRPOTrainer: unknown setting `rollout_func`; leave it out"),
        ({"reward_funcs": [{"weight": 1.0}]}, "`rewards.reward_funcs.0.function` is not set"),
        ({"eval_strategy": "steps", "train_dataset": ROWS}, "`eval_steps` 10 needs `eval_dataset_name`"),
    ],
)
def test_settings_that_cannot_be_used(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        trainer(**given)


@pytest.mark.parametrize(
    "name",
    [
        "compute_loss",
        "_compute_loss",
        "log",
        "training_step",
        "save_model",
        "evaluation_loop",
        "_generate_and_score_completions",
    ],
)
def test_an_override_that_is_never_called_is_refused(name: str):
    mixin = type("Mixin", (), {name: lambda self, *args, **kwargs: None})
    for made in (type("Mine", (GRPOTrainer,), dict(vars(mixin))), type("Mine", (mixin, GRPOTrainer), {})):
        with pytest.raises(ConfigError, match=rf"Mine has {name}, which only TRL's trainer calls"):
            made("some/model")


def test_a_subclass_may_override_what_is_called_and_have_methods_of_its_own():
    class Mine(GRPOTrainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return self.plot()

        def plot(self) -> str:
            return "drawn"

    assert Mine("some/model", prompts_per_step=2).train() == "drawn"


@pytest.mark.ci
def test_every_method_of_trl_s_trainer_is_called_here_or_refused():
    from trl.trainer.grpo_trainer import GRPOTrainer as Oracle

    methods = {name for name in dir(Oracle) if not name.startswith("__") and callable(getattr(Oracle, name))}
    assert len(methods) > 100
    assert methods - NOT_CALLED == {"train", "evaluate", "add_callback", "push_to_hub"}
    assert [name for name in NOT_CALLED if hasattr(GRPOTrainer, name)] == ["save_model"]  # which no run calls


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "accelerator",
            ": processes are accelerate's, while train() or evaluate() runs. For the main process, compare",
        ),
        ("model", ": the loop is not TRL's, and keeps its models to itself. The trained weights are in the directory"),
        ("state", ": train() returns the summary of the run, and `metrics.jsonl` in the run's directory has a line"),
        ("num_generations", ": it is the setting `config.rollout.num_generations`"),
        ("create_optimizer", ": the run makes its optimizer of the settings `optim`, `learning_rate`"),
        ("_prepare_inputs", ": it is internal to TRL's loop, which is not the one here. docs/python.md#subclasses"),
        ("environments", ": a reward function gets the instances of the environment in its argument `environments`"),
        ("tools", ": it is the setting `config.rollout.tools`"),
        ("max_tool_calling_iterations", ": it is the setting `config.rollout.max_turns`, one more than the rounds"),
        ("plot", ""),
    ],
)
def test_an_attribute_of_trl_s_trainer_has_a_reason(name: str, reason: str):
    with pytest.raises(AttributeError) as raised:
        getattr(trainer(), name)
    text = str(raised.value)
    assert text.startswith(f"GRPOTrainer has no `{name}`{reason}") and (reason or text.endswith("`plot`"))
    assert not hasattr(trainer(), name)


@pytest.mark.ci
def test_every_public_attribute_of_trl_s_trainer_has_a_reason():
    """An attribute is a public method, or is set on `self` in the source of one of TRL's classes."""
    from trl.trainer.grpo_trainer import GRPOTrainer as Oracle

    classes = [base for base in Oracle.__mro__ if base is not object]
    found = {name for base in classes for name in re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(base))}
    found |= set(dir(Oracle))
    names = {name for name in found if not name.startswith("_")}
    assert len(names) > 140
    unexplained = [name for name in sorted(names) if not hasattr(GRPOTrainer, name) and reason_without(name) is None]
    assert unexplained == []


def test_callables_are_recorded_by_a_hash_of_their_content():
    def brief(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) < 9) for text in completions]

    entries = [lambda completions: [1.0], "exact_match", {"function": brief, "weight": 0.5, "name": "short"}, brief]
    made = trainer(reward_funcs=entries)
    first, second, third, fourth = made.config.rewards.reward_funcs
    assert str(first).startswith("python:<lambda>#")
    assert second == "exact_match"
    assert not isinstance(third, str) and (third.weight, third.name) == (0.5, "short")
    assert third.function.startswith("python:short#") and str(fourth).startswith("python:brief#")
    assert third.function[-12:] == str(fourth)[-12:]
    assert trainer(reward_funcs=brief).config.rewards.reward_funcs == [fourth]
    assert [NAME.fullmatch(name) is not None for name in made.objects] == [True] * 3
    with live(made.objects), RewardSuite(made.config.rewards) as suite:
        assert suite.names == ["<lambda>", "exact_match", "short", "brief"]


def crop(x: int) -> str:
    """Crop the image.

    Args:
        x: Left edge.
    """
    return str(x)


class Game:
    """An environment."""

    def reset(self, **columns: Any) -> None: ...


class Shop(Game):
    stock = 3


def test_tools_and_environments_are_objects_or_names(tmp_path: Path):
    made = trainer(tools=[crop, "tools.py:add"], environment_factory=Game, max_tool_calling_iterations=3)
    first, second = made.config.rollout.tools
    assert first.startswith("python:crop#") and second == "tools.py:add"
    assert str(made.config.rollout.environment).startswith("python:Game#")
    assert made.config.rollout.max_turns == 4
    with live(made.objects):
        assert load_function(first)(3) == "3"
        assert type(load_function(str(made.config.rollout.environment))()) is Game
    (tmp_path / "config.yaml").write_text(to_yaml(made.config))
    assert load_config(tmp_path / "config.yaml") == made.config
    assert trainer(tools=crop).config.rollout.tools == [first]
    assert trainer(tools="tools.py:add").config.rollout.tools == ["tools.py:add"]
    assert trainer(tools=[], environment_factory=None).config.rollout.has_tools is False


def test_several_environments_are_named_by_rows():
    made = trainer(environment_factory={"game": Game, "shop": Shop, "file": "shop.py:Shop"})
    named = made.config.rollout.environment
    assert isinstance(named, dict)
    assert list(named) == ["game", "shop", "file"] and named["file"] == "shop.py:Shop"
    assert len(set(named.values())) == 3
    with live(made.objects):
        assert load_function(named["shop"])().stock == 3


def test_a_changed_environment_is_a_changed_setting():
    class Shop(Game):
        stock = 4

    same = trainer(environment_factory=globals()["Shop"]).config.rollout.environment
    assert trainer(environment_factory=globals()["Shop"]).config.rollout.environment == same
    assert trainer(environment_factory=Shop).config.rollout.environment != same


def test_functions_of_one_label_need_names():
    def limit(most: int) -> Any:
        return lambda completions: [float(len(text) < most) for text in completions]

    named = [{"function": limit(most), "name": f"below_{most}"} for most in (1, 2)]
    functions = trainer(reward_funcs=named).objects.values()
    assert [function(["a"]) for function in functions] == [[0.0], [1.0]]


@pytest.mark.parametrize("data", [ROWS, datasets.Dataset.from_list(ROWS)], ids=["list", "Dataset"])
def test_rows_in_memory(data: Any):
    made = trainer(train_dataset=data)
    name = made.config.data.dataset_name
    assert isinstance(name, str) and name.startswith("python:train_dataset#")
    with live(made.objects):
        first = load_rows(made.config.data, "train")[0]
    assert (first.prompt, first.columns["solution"], first.images[0].size) == ("Which digit?", "1", (4, 3))
    with pytest.raises(DataError, match=r"python:train_dataset#\w+"):
        load_rows(made.config.data, "train")


def test_other_rows_have_another_name():
    names = [trainer(train_dataset=rows).config.data.dataset_name for rows in (ROWS, list(ROWS), ROWS[::-1], ROWS[:1])]
    assert names[0] == names[1]
    assert len(set(names)) == 3


@pytest.mark.parametrize("data", [[], datasets.Dataset.from_list([])], ids=["list", "Dataset"])
def test_data_without_rows(data: Any):
    with pytest.raises(DataError, match="eval_dataset has no rows"):
        trainer(eval_dataset=data)


def test_rows_are_those_of_the_construction():
    rows = [dict(row) for row in ROWS]
    made = trainer(train_dataset=rows)
    rows[0]["solution"] = "9"
    rows.pop()
    with live(made.objects):
        loaded = load_rows(made.config.data, "train")
    assert len(loaded) == 2 and loaded[0].columns["solution"] == "1"


def test_a_mixture_is_no_list_of_rows():
    data = trainer(train_dataset=[{"name": "a.jsonl", "split": "x"}, "b.jsonl"]).config.data
    assert [entry.name for entry in data.entries("train")] == ["a.jsonl", "b.jsonl"]


def test_what_asks_for_nothing_is_accepted():
    nothing = {"callbacks": None, "processing_class": None, "reward_processing_classes": None, "peft_config": None}
    assert trainer(**nothing, quantization_config=None).config == trainer().config


def test_a_lora_config_is_settings_of_the_model(caplog: pytest.LogCaptureFixture):
    from peft import LoraConfig

    peft_config = LoraConfig(
        r=8, lora_alpha=4, target_modules=["v_proj", "q_proj"], exclude_modules=r".*\.3\..*", use_rslora=True,
        init_lora_weights="gaussian", task_type="CAUSAL_LM",
    )  # fmt: skip
    made = trainer(peft_config=peft_config).config.model
    assert (made.use_peft, made.lora_r, made.lora_alpha, made.use_rslora) == (True, 8, 4, True)
    assert (made.lora_target_modules, made.lora_exclude_modules) == (["q_proj", "v_proj"], r".*\.3\..*")
    assert made.init_lora_weights == "gaussian" and "peft_config" not in caplog.text
    defaults = trainer(peft_config=LoraConfig()).config.model
    assert (defaults.lora_r, defaults.lora_alpha, defaults.lora_target_modules) == (8, 8, "all-linear")
    with pytest.raises(ConfigError, match=r"`lora_r` and `model\.lora_r` both set `model\.lora_r`, to 4 and 8"):
        trainer(peft_config=peft_config, lora_r=4)


def test_what_differs_from_a_lora_config_is_logged_or_refused(caplog: pytest.LogCaptureFixture):
    from peft import IA3Config, LoraConfig

    trainer(peft_config=LoraConfig(lora_dropout=0.05))
    assert "`lora_dropout` 0.05 is left out: here adapters have none; `target_modules` is PEFT's choice" in caplog.text
    caplog.clear()
    trainer(peft_config=LoraConfig(target_modules=["q_proj"]))
    assert "the vision tower and its projector get no adapter, unless `lora_exclude_modules=[]` is" in caplog.text
    assert "dropout" not in caplog.text
    caplog.clear()
    trainer(peft_config=LoraConfig(target_modules=["q_proj", "vision_tower"]))
    assert "no adapter" not in caplog.text
    unlike = LoraConfig(lora_dropout=0.1, bias="all", use_dora=True, rank_pattern={"a": 4}, task_type="SEQ_CLS")
    named = "`task_type` 'SEQ_CLS', `lora_dropout` 0.1, `bias` 'all', `rank_pattern` {'a': 4}, `use_dora` True"
    with pytest.raises(ConfigError, match=re.escape(f"peft_config has {named}, which adapters here do not have")):
        trainer(peft_config=unlike)
    with pytest.raises(ConfigError, match="peft_config is a IA3Config: give a LoraConfig of PEFT"):
        trainer(peft_config=IA3Config())


@pytest.mark.parametrize("given", [{"dtype": torch.bfloat16}, {"model_init_kwargs": {"dtype": torch.bfloat16}}])
def test_a_precision_of_torch(given: dict[str, Any]):
    assert trainer(**given).config.model.dtype == "bfloat16"
    assert trainer(args={"seed": 3, **given}).config.model.dtype == "bfloat16"


def test_a_model_function_may_be_called_as_a_reward_function():
    assert len(trainer(model=token_sum, reward_funcs=token_sum).config.rewards.reward_funcs) == 1


def test_evaluate_takes_a_checkpoint():
    with pytest.raises(
        ConfigError, match="takes the path of a checkpoint, found a list: held-out rows are the argument"
    ):
        trainer().evaluate(ROWS)


def test_a_trainer_is_readable():
    made = trainer(
        reward_funcs=["exact_match", {"function": "format_tags", "name": "tags"}], train_dataset=["a.jsonl", "b.jsonl"],
        output_dir="runs/mine", use_peft=True, lora_r=8,
    )  # fmt: skip
    assert repr(made).splitlines() == [
        "GRPOTrainer",
        "  model              some/model with LoRA of rank 8",
        "  reward functions   exact_match, tags",
        "  training data      a.jsonl, b.jsonl",
        "  held-out data      none",
        "  run directory      runs/mine",
        "  newest checkpoint  none",
    ]


def test_a_model_is_saved_after_training(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"there is no model to save: call train\(\) first"):
        trainer(output_dir=tmp_path).save_model(tmp_path / "model")


def test_one_trainer_runs_at_a_time():
    with trainer()._prepared(), pytest.raises(ConfigError, match="another GRPOTrainer runs in this process"):
        trainer().train()


def test_the_allocator_is_configured_for_each_call(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with trainer()._prepared():
        assert os.environ[VARIABLES[0]] == "expandable_segments:True"
    with trainer(expandable_segments=False)._prepared():
        assert VARIABLES[0] not in os.environ
    monkeypatch.setenv(VARIABLES[0], "max_split_size_mb:64")
    with trainer()._prepared():
        pass
    assert os.environ[VARIABLES[0]] == "max_split_size_mb:64"


@pytest.mark.ci
def test_the_log_is_shown_in_a_session_without_handlers(tmp_path: Path):
    program = (
        "import logging\n{before}\nfrom rl_vlm import GRPOTrainer\n"
        "with GRPOTrainer('some/model', prompts_per_step=2)._prepared():\n"
        "    logging.getLogger('rl_vlm.run.run').info('resuming from checkpoint-3')\n"
    )

    def stderr(before: str) -> str:
        code = program.format(before=before)
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr

    assert "resuming from checkpoint-3\n" in stderr("")
    assert "resuming from" not in stderr("logging.basicConfig()")  # which shows warnings alone


def test_names_of_data_are_those_of_the_settings(tmp_path: Path):
    made = trainer(train_dataset=["a.jsonl", "b.jsonl"], eval_dataset=tmp_path / "c.jsonl")
    assert made.config.data.dataset_name == ["a.jsonl", "b.jsonl"]
    assert made.config.data.eval_dataset_name == str(tmp_path / "c.jsonl")
    with pytest.raises(
        DataError, match=r"train_dataset gives a range; expected a datasets\.Dataset or a list of dicts"
    ):
        trainer(train_dataset=range(3))


def test_keywords_override_args(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "run.yaml").write_text("train: {learning_rate: 0.5, seed: 3}")
    config = trainer(args=tmp_path / "run.yaml", learning_rate=0.25).config
    assert (config.train.learning_rate, config.train.seed) == (0.25, 3)
    flat = trainer(args={"seed": 3}, learning_rate=0.25).config.train
    assert (flat.learning_rate, flat.seed, flat.num_train_epochs) == (0.25, 3, 3.0)
    assert "args has no sections" in caplog.text


def test_an_object_of_trl_is_read_like_its_yaml(tmp_path: Path):
    trl = pytest.importorskip("trl", reason="needs trl for its GRPOConfig")
    fields = {
        "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4,
        "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "bf16": False, "eval_strategy": "steps", "eval_steps": 5,
        "report_to": "none", "logging_steps": 2,
    }  # fmt: skip
    sources = {"model_name_or_path": "some/model", "dataset_name": "a.jsonl", "eval_dataset_name": "b.jsonl"}
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(fields | sources))
    given = {"train_dataset": "a.jsonl", "eval_dataset": "b.jsonl"}
    made = GRPOTrainer("some/model", args=trl.GRPOConfig(use_cpu=True, **fields), **given)
    assert made.config == load_config(tmp_path / "trl.yaml")
    with pytest.raises(ConfigError, match="`save_only_model` is True: "):
        GRPOTrainer("some/model", args=trl.GRPOConfig(use_cpu=True, bf16=False, save_only_model=True))


def test_a_function_with_a_timeout_is_sent_to_its_process():
    trainer(reward_funcs={"function": token_sum, "timeout": 5.0})
    trainer(reward_funcs=[lambda completions: [1.0]])
    with pytest.raises(
        ConfigError, match=r"python:<lambda>#\w{12} has a timeout, .* cannot be sent there: .*lambda.*Wr"
    ):
        trainer(reward_funcs={"function": lambda completions: [1.0], "timeout": 5.0})


def test_a_function_of_a_session_without_a_file_is_not_sent(tmp_path: Path):
    program = (
        "from rl_vlm import GRPOTrainer\n"
        "def mine(completions): return [1.0]\n"
        "GRPOTrainer('some/model', {'function': mine, 'timeout': 5.0}, prompts_per_step=2)\n"
    )
    (tmp_path / "script.py").write_text(program)
    run = lambda *arguments: subprocess.run([sys.executable, *arguments], capture_output=True, text=True)  # noqa: E731
    assert "it is defined in a notebook or an interactive session" in run("-c", program).stderr
    assert run(str(tmp_path / "script.py")).returncode == 0


def test_data_that_names_main_is_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    trainer(reward_funcs={"function": partial(token_sum, note="__main__"), "timeout": 5.0})


def test_settings_with_such_names_can_be_read_again(tmp_path: Path):
    made = trainer(reward_funcs=lambda completions: [1.0], train_dataset=ROWS)
    (tmp_path / "config.yaml").write_text(to_yaml(made.config))
    assert load_config(tmp_path / "config.yaml") == made.config


def test_the_report_is_shown_in_a_frame_or_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = trainer(output_dir=tmp_path)
    monkeypatch.setattr("rl_vlm.log.progress_bar.in_notebook", lambda: False)
    with pytest.raises(
        ConfigError, match=r"no report in .*: train\(\) writes one unless the setting `report` is False"
    ):
        made.show_report()
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "report.html").touch()
    assert made.show_report() == tmp_path / "evaluation" / "report.html"
    (tmp_path / "report.html").write_text('<p class="a">7</p>')
    assert made.show_report() == tmp_path / "report.html" == made.report
    pytest.importorskip("IPython.display", reason="needs IPython")
    assert made.show_report() == made.report  # a script that imports IPython is no notebook
    monkeypatch.setattr("rl_vlm.log.progress_bar.in_notebook", lambda: True)
    assert 'srcdoc="&lt;p class=&quot;a&quot;&gt;7&lt;/p&gt;" width="100%" height="300"' in made.show_report(300).data


@pytest.mark.parametrize("is_deferred", [True, False])
@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_is_raised_as_in_other_python_programs(number, error, is_deferred, monkeypatch, tmp_path):
    def train(config: RunConfig, instruments: Any) -> dict[str, Any]:
        with stop.deferred(60.0) if is_deferred else nullcontext():
            os.kill(os.getpid(), number)
            end = time.monotonic() + 10
            while time.monotonic() < end:
                stop.check()
        return {}

    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("rl_vlm.run.run.train", train)
    with pytest.raises(error) as raised:
        trainer(output_dir=tmp_path).train()
    assert getattr(raised.value, "code", None) == (143 if error is SystemExit else None)
    assert (signal.signal(signal.SIGINT, before[0]), signal.getsignal(signal.SIGTERM)) == (
        signal.default_int_handler, before[1],
    )  # fmt: skip
