import re

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_vlm.config import yaml_text
from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.describe import HELP_SECTIONS, describe, settings_help, to_yaml
from rl_vlm.config.load import load_config
from rl_vlm.config.schema import SETTINGS, RunConfig

config = RunConfig.model_validate(
    {
        "model": {"model_name_or_path": "tiny", "use_peft": True, "lora_exclude_modules": ["visual"]},
        "data": {"dataset_name": "1e-6", "prompt_template": "{question}\nAnswer: no"},
        "rewards": {"reward_funcs": ["choice", {"function": "a:f", "kwargs": {"x": [1, None]}}]},
        "algorithm": {"num_iterations": 3},
        "train": {"prompts_per_step": 4, "steps_per_generation": 2, "learning_rate": 1e-6},
    }
)


joining = RunConfig.model_validate(
    {
        "model": {"model_name_or_path": "tiny"},
        "rollout": {"engine": "vllm_server"},
        "vllm": {"vllm_server_base_url": ["http://a:1"], "vllm_request_timeout": 60},
    }
)


@pytest.mark.parametrize("run", [config, joining])
def test_the_resolved_yaml_loads_to_the_same_config(tmp_path, run):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(run))
    assert load_config(path) == run


@settings(max_examples=50, deadline=None)
@example("next\x85line")
@given(st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=3))
def test_values_survive_yaml(value):
    assert yaml_text.parse(yaml_text.dump({"key": value})) == {"key": value}


def test_a_description_is_yaml_with_the_batches_worked_out():
    text = describe(config, batch_sizes(config, world_size=2))
    assert yaml.safe_load(text)["train"]["prompts_per_step"] == 4
    assert text.splitlines()[:13] == [
        "# Settings that differ from the defaults:",
        "#   model.model_name_or_path: tiny",
        "#   model.use_peft: true",
        "#   model.lora_exclude_modules: [visual]",
        "#   data.dataset_name: '1e-6'",
        '#   data.prompt_template: "{question}\\nAnswer: no"',
        "#   rewards.reward_funcs: [choice, {function: 'a:f', kwargs: {x: [1, null]}}]",
        "#   algorithm.num_iterations: 3",
        "#   train.prompts_per_step: 4",
        "#   train.steps_per_generation: 2",
        "# All settings:",
        "model:",
        "  model_name_or_path: tiny",
    ]
    assert text.splitlines()[-4:] == [
        "# Optimizer step: 4 prompts × 8 = 32 completions, 2 prompts on each of 2 processes.",
        "# Generation window: 2 × 4 = 8 prompts sampled at once, for 3 × 2 = 6 optimizer steps.",
        "# Run: 1 × the number of rows / 8, rounded up, × 6 optimizer steps (num_train_epochs).",
        "# Micro-batches: what fits on the device, by the memory plan; their number changes no result.",
    ]


def test_a_description_of_a_run_with_max_steps():
    limited = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 7})})
    text = describe(limited, batch_sizes(limited, world_size=1))
    assert "# Optimizer step: 4 prompts × 8 = 32 completions, all on one process.\n" in text
    assert "# Run: 7 optimizer steps (max_steps).\n" in text


def test_help_lists_every_setting_with_type_default_and_docstring():
    text = settings_help()
    for setting, field in SETTINGS.items():
        assert f"\n  {setting.split('.')[1]}: " in text
        assert (field.description or "missing").splitlines()[0] in text
    assert "  top_p: number = 1.0\n      Sample from" in text
    assert "  model_name_or_path: text, required\n" in text


HEAD = re.compile(r"  (?P<name>\w+): (?P<type>.+?)(?:, required| = (?P<default>.*))")


def test_types_in_the_help_are_words_and_defaults_are_yaml():
    heads = [found for line in settings_help().splitlines() if (found := HEAD.fullmatch(line))]
    fields = [field for section in HELP_SECTIONS.values() for field in section.model_fields.values()]
    assert len(heads) == len(fields) > 150
    python = re.compile(
        r"[\[\]|(]|\b(str|int|float|bool|list\[|dict|None|NoneType|Literal|Union|Optional|Any|True|False)\b"
    )
    assert [head["name"] for head in heads if python.search(head["type"])] == []
    for head, field in zip(heads, fields, strict=True):
        assert (head["default"] is None) == field.is_required()
        assert field.is_required() or yaml_text.parse(head["default"]) == field.default, head["name"]


@pytest.mark.parametrize(
    "head",
    [
        "dtype: float32 or bfloat16 = null",
        "attn_implementation: sdpa or eager = sdpa",
        "use_peft: true or false = false",
        "init_lora_weights: true, false, gaussian, pissa, olora or orthogonal = true",
        "trainable_modules: list of texts or text = null",
        "dataset_name: text or list of texts or mappings = null",
        "columns: mapping to texts = {}",
        "chat_template_kwargs: mapping = {}",
        "reward_weights: list of numbers = null",
        "max_pixels: whole number = null",
        "micro_batch_tokens: whole number or auto = auto",
        "learning_rate: number = 1.0e-06",
        "function: text, required",
    ],
)
def test_the_head_of_a_setting(head):
    assert f"\n  {head}\n" in settings_help()
