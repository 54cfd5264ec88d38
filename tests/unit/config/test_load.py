import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_vlm.config import yaml_text
from rl_vlm.config.load import FULL_NAMES, check_evaluable, check_trainable, load_config
from rl_vlm.config.rules import UNREAD
from rl_vlm.config.schema import SETTINGS, RewardSpec
from rl_vlm.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value).replace(str(path), "run.yaml").splitlines()


def test_sections_and_flat_keys_mix(write):
    config = load_config(write("model: {model_name_or_path: tiny}\nbeta: 0.1\ntrain:\n  max_steps: 5\n"))
    assert (config.model.model_name_or_path, config.algorithm.beta, config.train.max_steps) == ("tiny", 0.1, 5)


def test_a_section_can_be_given_on_the_command_line(write):
    path = write("model: {model_name_or_path: tiny}\n")
    assert load_config(path, ["train={max_steps: 3, seed: 1}"]).train.max_steps == 3


def test_overrides_win_and_are_read_as_yaml(write):
    path = write("model_name_or_path: tiny\nmax_steps: 5\nlearning_rate: 1e-5\n")
    config = load_config(path, ["train.max_steps=10", "report_to=[wandb, mlflow]", "use_peft=true", "run_name=null"])
    assert (config.train.max_steps, config.log.report_to, config.model.use_peft) == (10, ["wandb", "mlflow"], True)
    assert (config.train.learning_rate, config.log.run_name) == (1e-5, None)


def test_null_stands_for_the_default(write):
    config = load_config(write("model_name_or_path: tiny\nnum_generations: null\nmax_steps: 5\n"), ["max_steps=null"])
    assert (config.rollout.num_generations, config.train.max_steps) == (8, None)


def test_exponents_without_a_dot_are_numbers(write):
    config = load_config(write("model_name_or_path: tiny\nchat_template_kwargs: {share: 1e-1}\n"))
    assert config.data.chat_template_kwargs == {"share": 0.1}


def test_one_name_stands_for_a_list(write):
    config = load_config(write("model_name_or_path: tiny\nlog: {report_to: none}\nrewards: {reward_funcs: choice}\n"))
    assert (config.log.report_to, config.rewards.reward_funcs) == ([], ["choice"])


def test_reward_mappings(write):
    config = load_config(
        write("model_name_or_path: tiny\nreward_funcs: [choice, {function: 'a.py:f', weight: 2, timeout: 1}]\n")
    )
    assert config.rewards.reward_funcs == ["choice", RewardSpec(function="a.py:f", weight=2.0, timeout=1.0)]


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        ("learnin_rate: 1", "", "run.yaml: unknown setting `learnin_rate`; the closest is `train.learning_rate`"),
        ("train: {beta: 1}", "", "run.yaml: unknown setting `train.beta`; the closest is `algorithm.beta`"),
        ("", "trian.seed=1", "command line: unknown setting `trian.seed`; the closest is `train.seed`"),
        ("trian: {seed: 1}", "", "run.yaml: unknown setting `trian`; the closest is `train`"),
        ("zzzz: 1", "", "run.yaml: unknown setting `zzzz`; see `rl-vlm train --help`"),
        (
            "",
            "model=Qwen/Qwen3-VL-2B-Instruct",
            "command line: `model` is a section and holds `key: value` settings, found 'Qwen/Qwen3-VL-2B-Instruct'; "
            "did you mean `model.model_name_or_path`?",
        ),
        (
            "",
            "data=rows.jsonl",
            "command line: `data` is a section and holds `key: value` settings, found 'rows.jsonl'; "
            "did you mean `data.dataset_name`?",
        ),
        ("", "output_dir=", "command line: `output_dir=` has no value; write `output_dir=null` for the default"),
        ("output_dir: ''", "", "run.yaml: `train.output_dir` is '': it is empty; write null for the default"),
        ("", "seed=-1", "command line: `train.seed` is -1: it should be greater than or equal to 0"),
        ("", "seed=4294967296", "command line: `train.seed` is 4294967296: it should be less than 4294967296"),
        ("", "num_train_epochs=.inf", "command line: `train.num_train_epochs` is inf: it should be a finite number"),
        ("", "learning_rate=.nan", "command line: `train.learning_rate` is nan: it should be a finite number"),
        ("", "reward_weights=[.inf]", "command line: `rewards.reward_weights.0` is inf: it should be a finite number"),
        (
            "train_files: a",
            "",
            "run.yaml: unknown setting `train_files`; write `data.dataset_name`: a name, "
            "also with @split, or a list of them",
        ),
        (
            "worker: {rollout: {n: 5}}",
            "",
            "run.yaml: unknown setting `worker.rollout.n`; write `rollout.num_generations`",
        ),
        ("lora_rank: 8", "", "run.yaml: unknown setting `lora_rank`; write `model.lora_r`"),
        ("", "top_p=2", "command line: `rollout.top_p` is 2: it should be less than or equal to 1"),
        ("dtype: fp8", "", "run.yaml: `model.dtype` is 'fp8': it should be 'float32' or 'bfloat16'"),
        (
            "lora_target_modules: 3",
            "",
            "run.yaml: `model.lora_target_modules` is 3: it should be a valid list or it should be a valid string",
        ),
        (
            "reward_funcs: [{function: f, wieght: 2}]",
            "",
            "run.yaml: unknown setting `rewards.reward_funcs.0.wieght`; the closest is `weight`",
        ),
        (
            "dataset_name: [a.jsonl, {name: b.jsonl, wieght: 2}]",
            "",
            "run.yaml: unknown setting `data.dataset_name.1.wieght`; the closest is `weight`",
        ),
        (
            "",
            "dataset_name=[3]",
            "command line: `data.dataset_name.0` is 3: it should be a valid string or it should "
            "be a valid dictionary or instance of DataSource",
        ),
        (
            "reward_funcs: [f, {name: g}]",
            "",
            "run.yaml: `rewards.reward_funcs.1.function` is not set; see `rl-vlm train --help`",
        ),
        (
            "reward_funcs: [f, {function: g, weight: .nan}]",
            "",
            "run.yaml: `rewards.reward_funcs.1.weight` is nan: it should be a finite number",
        ),
        ("", "reward_weights=[.inf]", "command line: `rewards.reward_weights.0` is inf: it should be a finite number"),
        ("", "learning_rate=.inf", "command line: `train.learning_rate` is inf: it should be a finite number"),
        (
            "reward_funcs: [{function: g, completions: chat}]",
            "",
            "run.yaml: `rewards.reward_funcs.0.completions` is 'chat': it should be 'auto', 'messages' or 'text'",
        ),
        (
            "max_fault_fraction: 2",
            "",
            "run.yaml: `rewards.max_fault_fraction` is 2: it should be less than or equal to 1",
        ),
        ("output_dir: {a: 1}", "", "run.yaml: `train.output_dir` is {'a': 1}: it should be a valid string"),
        (
            "",
            "prompt_template={question}",
            "command line: `data.prompt_template` is {'question': None}: it should be a valid string; YAML reads "
            """braces as a mapping, so quote the text: `'prompt_template="{question}"'` on the command line, """
            """`prompt_template: "{question}"` in a file""",
        ),
        (
            "",
            "attn_implementation=flash_attention_2",
            "command line: `model.attn_implementation` is 'flash_attention_2': it should be 'sdpa' or 'eager'; "
            "flash-attn is not used: leave it out. On CUDA, `sdpa` has PyTorch's own flash kernels, and rows that "
            "share a prompt can have them (`memory.shared_attention`)",
        ),
        (
            "",
            "loss_type=gspo",
            "command line: `algorithm.loss_type` is 'gspo': it should be 'grpo', 'bnpo', 'dr_grpo', 'dapo', 'cispo' or "
            "'sapo', or a function of your own, `file.py:function` or `module:function`; GSPO is "
            "`importance_sampling_level: sequence` with any of these losses (docs/losses.md)",
        ),
        (
            "quantization_config: {load_in_4bit: true}",
            "",
            "run.yaml: unknown setting `quantization_config`; write `load_in_4bit: true` for QLoRA, with "
            "`bnb_4bit_quant_type` and `use_bnb_nested_quant` (docs/memory.md); other quantizations are not supported",
        ),
        (
            "environment_factory: 'game.py:Game'",
            "",
            "run.yaml: unknown setting `environment_factory`; write `rollout.environment`: `file.py:Class`, or several "
            "classes by name",
        ),
        (
            "rollout_func: 'mine.py:f'",
            "",
            "run.yaml: unknown setting `rollout_func`; leave it out: `rollout.engine` samples, and "
            "`rollout.environment` is for several turns",
        ),
        (
            "actor_rollout_ref: {rollout: {multi_turn: {tool_config_path: tools.yaml}}}",
            "",
            "run.yaml: unknown setting `actor_rollout_ref.rollout.multi_turn.tool_config_path`; write `rollout.tools`, "
            "functions with type hints and docstrings, or `rollout.environment`, a class with such methods",
        ),
        (
            "max_tool_calling_iterations: 0",
            "",
            "run.yaml: `max_tool_calling_iterations` is 0: it should be a number of rounds above 0; leave it out for "
            "the default of `rollout.max_turns`",
        ),
        (
            "beta: 0.1\nalgorithm: {beta: 0.2}",
            "",
            "run.yaml: `beta` and `algorithm.beta` both set `algorithm.beta`, to 0.1 and 0.2; keep one of them",
        ),
    ],
)
def test_a_bad_setting_names_source_key_and_way_out(write, text, override, expected):
    assert problems(write(f"model_name_or_path: tiny\n{text}\n"), *filter(None, [override])) == [expected]


def test_all_problems_are_reported_at_once(write):
    found = problems(write("max_step: 1\ntrain: {seed: x}\nfp16: true\n"), "save_steps=-1")
    assert [line.split(" is ")[0] for line in found] == [
        "run.yaml: unknown setting `max_step`; the closest",
        "run.yaml: `fp16`",
        "run.yaml: `model.model_name_or_path`",
        "run.yaml: `train.seed`",
        "command line: `train.save_steps`",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2", "key `seed` is given twice"),
        ("train: {seed: 1, seed: 1}", "key `seed` is given twice"),
        ("[1, 2]", "expected `key: value` settings, found [1, 2]"),
        ("train: 3", "`train` is a section and holds `key: value` settings, found 3"),
        ("train: {", "not valid YAML"),
        ("seed: 2020-13-45", "not valid YAML: month must be in 1..12"),
        ("seed: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
        ("seed: " + "[" * 3000, "not valid YAML: it is nested too deeply"),
    ],
)
def test_unreadable_files(write, text, expected):
    assert expected in "\n".join(problems(write(text)))


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(("name", "content"), [("a.yaml", b"seed: \xff"), ("a\0.yaml", None)])
def test_files_that_hold_no_text(tmp_path, name, content):
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"a.*\.yaml: cannot be read as text: "):
        load_config(tmp_path / name)


@pytest.mark.parametrize(
    "value", ["a\nb", {"a": "b\nc"}, ["---\n"], "a\r\tb", "\u2028", "é😀", "\x1b[31m", "$(id) # x", "x: y"]
)
def test_one_line_is_read_back(value):
    line = yaml_text.one_line(value)
    assert "\n" not in line and yaml_text.parse(line) == value


def test_malformed_overrides(write):
    path = write("model_name_or_path: tiny")
    assert problems(path, "max_steps") == ["command line: `max_steps` is not of the form key=value"]
    (problem, *_) = problems(path, "prompt_template={question} now")
    assert """quote it: `'prompt_template="{question} now"'` on the command line""" in problem
    assert load_config(path, ['prompt_template="{question} now"']).data.prompt_template == "{question} now"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("sync_ref_model: true", "`sync_ref_model` needs `beta` above 0"),
        ("{sync_ref_model: true, beta: 0.1, use_peft: true}", "`sync_ref_model` cannot be used with `use_peft`"),
        ("{trainable_modules: [lm_head], use_peft: true}", "`trainable_modules` cannot be used with `use_peft`"),
        ("{trainable_modules: lm_head, freeze_vision_tower: true}", "`freeze_vision_tower` are both given"),
        (
            "{use_peft: true, freeze_vision_tower: true, lora_target_modules: [q_proj, projector]}",
            "`lora_target_modules` names the vision tower or its projector, which `freeze_vision_tower` freezes",
        ),
        ("loss_type: cispo", "`loss_type` cispo needs `epsilon_high`"),
        ("turn_advantages: gigpo", "`turn_advantages` gigpo needs `tools` or `environment`"),
        (
            "{tools: 'a.py:f', turn_advantages: return, importance_sampling_level: sequence}",
            "a ratio per completion gives all its turns the mean of their advantages",
        ),
        (
            "{tools: 'a.py:f', max_rollout_tokens: 9}",
            "`max_rollout_tokens` cannot be used with `tools` or `environment`",
        ),
        ("{environment: 'a.py:A', max_rollout_tokens: 9}", "or limit a turn with `max_turn_tokens`"),
        ("{tools: 'a.py:f', endpoint_url: 'http://a:1'}", "endpoints return no token ids"),
        ("{video_format: native, endpoint_url: 'http://a:1'}", "endpoints get each frame of a video as an image"),
        (
            "{tools: 'a.py:f', max_turn_tokens: 512}",
            "`max_turn_tokens` 512 has no effect: it must be below `max_completion_length` 512, which counts all turns",
        ),
        (
            "{environment: 'a.py:A', environment_protocol: steps, tools: 'a.py:f'}",
            "`tools` cannot be used with `environment_protocol` steps",
        ),
        ("dataset_name: 'draws:8'", "`draws:` in `dataset_name` needs a class in `environment`"),
        (
            "{eval_dataset_name: 'draws:8', environment: {a: 'a.py:A'}}",
            "`draws:` in `eval_dataset_name` needs a class in `environment`",
        ),
        (
            "{environment: {a: 'a.py:A'}, environment_protocol: steps, environment_kwargs: {size: 4}}",
            "`environment_kwargs` cannot be used with several classes in `environment`",
        ),
        ("environment: {}", "`environment` is an empty mapping; name classes, or write null"),
        ("{loss_type: sapo, epsilon_high: 0.3}", "`epsilon_high` has no effect on `loss_type` sapo"),
        ("{loss_type: sapo, delta: 2}", "`delta` has no effect on `loss_type` sapo"),
        ("{reward_funcs: [a, b], reward_weights: [1]}", "`reward_weights` has 1 entries for 2 `reward_funcs`"),
        ("{reward_funcs: [{function: a, weight: 2}], reward_weights: [1]}", "are both given"),
        ("{num_generations_eval: 4, eval_temperature: 0, eval_dataset_name: d}", "set `eval_temperature` above 0"),
        (
            "{vllm_max_model_length: 64, vllm_weight_transfer: nccl, vllm_num_servers: 1}",
            "`vllm_max_model_length`, `vllm_weight_transfer`: no effect on `engine` hf; leave them out, disable them "
            "with `use_vllm: false`, or set `engine` to vllm or vllm_server",
        ),
        ("{engine: hf, vllm_enable_sleep_mode: true}", "`vllm_enable_sleep_mode`: no effect on `engine` hf"),
        (
            "{engine: vllm, vllm_max_model_length: 64, vllm_num_servers: 2, vllm_server_timeout: 1}",
            "`vllm_num_servers`, `vllm_server_timeout`: no effect on `engine` vllm; leave them out, or set `engine` to "
            "vllm_server",
        ),
        ("{engine: vllm, vllm_request_timeout: 1}", "`vllm_request_timeout`: no effect on `engine` vllm"),
        ("{engine: vllm, vllm_server_base_url: 'http://a:1'}", "`vllm_server_base_url`: no effect on `engine` vllm"),
        (
            "{engine: vllm_server, vllm_enable_sleep_mode: true}",
            "`vllm_enable_sleep_mode`: no effect on `engine` vllm_server; leave them out, or set `engine` to vllm",
        ),
        (
            "{engine: vllm_server, vllm_server_base_url: 'http://a:1', vllm_num_servers: 2}",
            "apply to servers that the run starts",
        ),
        ("{engine: vllm_server, vllm_server_base_url: 'a:1'}", "an address must begin with http:// or https://"),
        ("{min_pixels: 9, max_pixels: 4}", "`min_pixels` 9 is above `max_pixels` 4"),
        ("{fps: 1, num_frames: 8}", "`fps` 1.0 and `num_frames` 8 both choose the number of frames of a video"),
        ("{min_frames: 9, max_frames: 8}", "`min_frames` 9 is above `max_frames` 8"),
        ("{num_frames: 65}", "`num_frames` 65 is not between `min_frames` 4 and `max_frames` 64"),
        ("{video_min_pixels: 9, video_max_pixels: 4}", "`video_min_pixels` 9 is above `video_max_pixels` 4"),
        ("{use_peft: true, beta: 0.1, init_lora_weights: pissa}", "`init_lora_weights` pissa changes the base weights"),
        ("{use_peft: true, beta: 0.1, init_lora_weights: olora}", "set `beta` to 0"),
        ("load_in_4bit: true", "`load_in_4bit` needs `use_peft: true`: 4-bit weights have no gradients"),
        ("{load_in_4bit: true, use_peft: true, init_lora_weights: olora}", "which `load_in_4bit` keeps in 4 bits"),
        (
            "{load_in_4bit: true, use_peft: true, engine: vllm, lora_sync: merge}",
            "`load_in_4bit` cannot be used with `engine` vllm",
        ),
        (
            "{load_in_4bit: true, use_peft: true, engine: vllm_server}",
            "not the policy that is trained; set `engine` to hf",
        ),
        ("lr_scheduler_kwargs: {num_cycles: 2}", "has num_cycles; valid for `lr_scheduler_type` linear: none"),
        ("lr_scheduler_kwargs: {min_lr: x}", "has min_lr; valid for `lr_scheduler_type` linear: none"),
        (
            "{lr_scheduler_type: polynomial, lr_scheduler_kwargs: {pwoer: 2}}",
            "has pwoer; valid for `lr_scheduler_type` polynomial: lr_end, power",
        ),
        ("lr_scheduler_type: cosine_with_min_lr", "needs one of `min_lr` and `min_lr_rate`"),
        (
            "{lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 2.0e-6}}",
            "`min_lr` 2e-06 in `lr_scheduler_kwargs` is above the peak, `learning_rate` 1e-06",
        ),
        (
            "{lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: '0.1'}}",
            "`min_lr` in `lr_scheduler_kwargs` is '0.1': it should be a valid number",
        ),
        (
            "{lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 1.5}}",
            "`min_lr_rate` in `lr_scheduler_kwargs` is 1.5: it should be less than or equal to 1",
        ),
        (
            "{lr_scheduler_type: cosine_with_restarts, lr_scheduler_kwargs: {num_cycles: 0.5}}",
            "`num_cycles` in `lr_scheduler_kwargs` is 0.5: it should be a valid integer",
        ),
        (
            "{lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 2, decay_type: exp}}",
            "`decay_type` in `lr_scheduler_kwargs` is 'exp': it should be 'linear', 'cosine' or '1-sqrt'",
        ),
        (
            "{lr_scheduler_type: inverse_sqrt, lr_scheduler_kwargs: {timescale: [3]}}",
            "`timescale` in `lr_scheduler_kwargs` is [3]: it should be a valid integer",
        ),
        (
            "{lr_scheduler_type: polynomial, learning_rate: 1.0e-7}",
            "`lr_end` 1e-07 in `lr_scheduler_kwargs` (default 1e-07) is not below the peak, `learning_rate` 1e-07",
        ),
        ("{delta: 1.2}", "`delta` 1.2 is not above 1 + `epsilon` = 1.2"),
        ("{delta: 1.25, epsilon_high: 0.28}", "`delta` 1.25 is not above 1 + `epsilon_high` = 1.28"),
        (
            "{output_dir: ~/runs/a}",
            "`output_dir` ~/runs/a: `~` and `$` are not expanded, so this would be",
        ),
        ("{output_dir: $NOT_SET/runs}", "would be a directory of that name; write the whole path"),
        ("{output_dir: $HOME/runs}", f"write {os.path.expanduser('~')}/runs, or leave it to the shell"),
        ("{endpoint_url: 'http://me:pass@a:1/v1'}", "`endpoint_url` http://***@a:1/v1: leave the login before @ out"),
        ("{endpoint_url: 'http://a:99999'}", "`endpoint_url` http://a:99999: it is no address: Port out of range"),
        ("{endpoint_url: 'http:///v1'}", "`endpoint_url` http:///v1: it has no host"),
        (
            "{engine: vllm_server, vllm_server_base_url: 'http://me:pass@a:1'}",
            "`vllm_server_base_url` http://***@a:1: ",
        ),
        (
            "{lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 0, min_lr_rate: 0}}",
            "needs one of `min_lr` and `min_lr_rate`",
        ),
        ("lr_scheduler_type: warmup_stable_decay", "needs `num_decay_steps`"),
        ("eval_steps: 5", "`eval_steps` 5 needs `eval_dataset_name`"),
        ("load_best_model_at_end: true", "`load_best_model_at_end` needs `eval_dataset_name` and `eval_steps`"),
        (
            "{load_best_model_at_end: true, eval_dataset_name: d, eval_steps: 4, save_steps: 10}",
            "`save_steps` to be a multiple of `eval_steps` 4",
        ),
    ],
)
def test_combinations_that_contradict_each_other(write, settings, expected):
    path = write(settings)
    found = problems(path, "model_name_or_path=tiny")
    assert len(found) == 1
    assert found[0].startswith("run.yaml: ")
    assert expected in found[0]


WITHOUT = {
    "verify_length: 900": "without `verify: full`",
    "lora_r: 4": "without `use_peft`",
    "lora_alpha: 4": "without `use_peft`",
    "lora_target_modules: [q_proj]": "without `use_peft`",
    "lora_exclude_modules: [q_proj]": "without `use_peft`",
    "init_lora_weights: gaussian": "without `use_peft`",
    "use_rslora: true": "without `use_peft`",
    "{use_peft: true, bnb_4bit_quant_type: fp4}": "without `load_in_4bit`",
    "{use_peft: true, use_bnb_nested_quant: true}": "without `load_in_4bit`",
    "dataset_train_split: trian": "without `dataset_name`",
    "dataset_test_split: dev": "without `eval_dataset_name`",
    "{dataset_name: a.jsonl, dataset_train_split: trian}": "on a file, which is one split",
    "{eval_dataset_name: a.parquet, dataset_test_split: dev}": "on a file, which is one split",
    "{dataset_name: a.json, dataset_config: x}": "without data of the hub or a directory",
    "{dataset_name: 'a.py:rows', dataset_config: x}": "without data of the hub or a directory",
    "dataloader_prefetch_factor: 2": "without `dataloader_num_workers`",
    "weight_sync_steps: 2": "on `engine` hf",
    "agreement_steps: 10": "on `engine` hf",
    "{engine: vllm, ds3_gather_for_generation: false}": "on an engine with weights of its own",
    "lora_sync: merge": "on `engine` hf",
    "max_turns: 3": "without `tools` or `environment`",
    "keep_images: 2": "without `tools` or `environment`",
    "{tools: ['a.py:f'], edit_every: 2}": "without `keep_images`: contexts hold all images",
    "max_tool_calling_iterations: 2": "without `tools` or `environment`",
    "{max_turn_tokens: 5, tool_timeout: 5, tool_errors: mask}": "without `tools` or `environment`",
    "{observation_role: user, tool_format: text}": "without `tools` or `environment`",
    "max_environments: 4": "without `tools` or `environment`",
    "environment_protocol: steps": "without `tools` or `environment`",
    "environment_isolation: process": "without `tools` or `environment`",
    "{tools: 'a.py:f', environment_isolation: process}": "without `environment`: tools have no instances",
    "{environment: 'a.py:A', environment_memory: 1GiB}": "with `environment_isolation` thread",
    "environment_kwargs: {size: 4}": "without `tools` or `environment`",
    "{tools: 'a.py:f', environment_protocol: steps}": "without `environment`: tools have no instances",
    "{environment: 'a.py:A', environment_kwargs: {size: 4}}": "with `environment_protocol` tools",
    "{environment: 'a.py:A', environment_protocol: steps, tool_format: text}": "with `environment_protocol` steps",
    "{environment: 'a.py:A', environment_protocol: steps, observation_role: user}": "with `environment_protocol` steps",
    "{tools: 'a.py:f', max_environments: 4}": "without `environment`: tools have no instances",
    "{tools: 'a.py:f', turn_discount: 0.5}": "without `turn_advantages`",
    "{tools: 'a.py:f', turn_advantages: return, turn_weight: 2}": "without `turn_advantages: gigpo`",
    "{num_generations_eval: 2, eval_temperature: 1}": "without `eval_dataset_name`",
    "sapo_temperature_neg: 2": "on a `loss_type` other than sapo",
    "sapo_temperature_pos: 2": "on a `loss_type` other than sapo",
    "{loss_type: sapo, epsilon: 0.3}": "on `loss_type` sapo",
    "{loss_type: cispo, epsilon_high: 5, epsilon: 0.3}": "on `loss_type` cispo",
    "{loss_type: cispo, epsilon_high: 5, delta: 2}": "on `loss_type` cispo",
    "{loss_type: grpo, loss_normalizer: window}": "on a `loss_type` other than dapo and cispo",
    "{loss_type: grpo, loss_weights: budget}": "on a built-in `loss_type`, which has its own",
    "{loss_type: 'rl_vlm.algorithm.losses:sapo_loss', epsilon: 0.3}": "on a `loss_type` of your own whose source does",
    "{loss_type: 'rl_vlm.algorithm.losses:sapo_loss', epsilon_high: 0.3}": "on a `loss_type` of your own",
    "{loss_type: 'rl_vlm.algorithm.losses:cispo_loss', epsilon_high: 5, delta: 2}": "on a `loss_type` of your own",
    "{loss_type: 'rl_vlm.algorithm.losses:clipped_loss', sapo_temperature_neg: 2}": "on a `loss_type` of your own",
    "{loss_type: 'rl_vlm.algorithm.losses:clipped_loss', sapo_temperature_pos: 2}": "on a `loss_type` of your own",
    "{loss_type: 'a.py:f', loss_weights: budget, loss_normalizer: window}": "on `loss_weights` other than token",
    "use_bias_correction_kl: false": "without `beta`",
    "{beta: 0.1, ref_model_mixup_alpha: 0.5}": "without `sync_ref_model`",
    "ref_model_sync_steps: 5": "without `sync_ref_model`",
    "{engine: vllm, vllm_importance_sampling_correction: false, vllm_importance_sampling_mode: token_mask, "
    "vllm_importance_sampling_clip_max: 2, vllm_importance_sampling_clip_min: 1}": (
        "without `vllm_importance_sampling_correction`"
    ),
    "{optim: adafactor, adam_beta1: 0.8, adam_beta2: 0.9, adam_epsilon: 1.0e-6}": "on `optim` adafactor",
    "{lr_scheduler_type: constant, warmup_steps: 5}": "on `lr_scheduler_type` constant",
    "metric_for_best_model: kl": "without `load_best_model_at_end`",
    "greater_is_better: false": "without `load_best_model_at_end`",
    "{gradient_checkpointing: vision_tower, freeze_vision_tower: true}": "on a frozen vision tower",
    "{shared_attention: sdpa, prefix_sharing: dense}": "without shared rows",
    "{shared_attention: flex, attn_implementation: eager}": "without shared rows",
    "endpoint_timeout: 5": "without `endpoint_url`",
    "endpoint_max_retries: 5": "without `endpoint_url`",
    "endpoint_max_concurrency: 5": "without `endpoint_url`",
    "run_name: x": "without `report_to`",
    "logging_steps: 5": "without `report_to`",
}
"""Settings, and why they have no effect."""


@pytest.mark.parametrize(("settings", "reason"), WITHOUT.items())
def test_a_setting_without_effect_is_refused_by_name(write, settings, reason):
    (found,) = problems(write(f"model: {{model_name_or_path: tiny}}\n{as_lines(settings)}"))
    assert f"no effect {reason}" in found and "leave " in found


def as_lines(settings: str) -> str:
    """A flow mapping as one `key: value` per line, which can stand beside sections."""
    mapping = yaml_text.parse(settings)
    return "".join(f"{key}: {yaml_text.one_line(value)}\n" for key, value in mapping.items())


def test_every_rule_of_settings_without_effect_has_an_example():
    named = {key for settings in WITHOUT for key in yaml_text.parse(settings)}
    assert {name for row in UNREAD for name in row.names.split()} <= named


def test_settings_at_their_defaults_have_no_effect_and_pass(write):
    defaults = {
        name: SETTINGS[FULL_NAMES[name]].default
        for row in UNREAD
        for name in row.names.split()
        if SETTINGS[FULL_NAMES[name]].default is not None
    }
    assert len(defaults) > 20
    load_config(write("model: {model_name_or_path: tiny}\n" + yaml_text.dump(defaults)))


@pytest.mark.parametrize(
    "settings",
    [
        "{resume_from_checkpoint: auto, overwrite_output_dir: true}",
        "{vllm_num_servers: 1, vllm_server_timeout: 1800, vllm_gpu_memory_utilization: 0.3, vllm_server_base_url: []}",
        "{engine: vllm, vllm_enable_sleep_mode: true, expandable_segments: true, vllm_max_logp_difference: 1}",
        "{engine: vllm, vllm_num_servers: 1}",
        "{engine: vllm_server, vllm_server_base_url: 'http://a:1', vllm_num_servers: 1, vllm_request_timeout: 9}",
        "{use_peft: true, beta: 0.1, init_lora_weights: orthogonal}",
        "{use_peft: true, init_lora_weights: pissa}",
        "{use_peft: true, load_in_4bit: true, bnb_4bit_quant_type: fp4, use_bnb_nested_quant: true, beta: 0.1}",
        "{use_peft: true, load_in_4bit: true, engine: vllm, endpoint_url: 'http://a:1'}",
        "{lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.1}}",
        "{lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1.0e-6, num_cycles: 1}}",
        "{lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 2, num_stable_steps: null}}",
        "{delta: 1.21}",
        "{tools: ['a.py:f', 'b:g'], max_turns: 3, max_turn_tokens: 100, tool_timeout: 5, tool_errors: mask}",
        "{environment: {a: 'a.py:A', b: 'b:B'}, max_environments: 4, observation_role: user, tool_format: text}",
        "{environment: 'gymnasium:X-v1', environment_protocol: steps, environment_kwargs: {actions: {left: 0}}}",
        "{environment: 'a.py:A', environment_isolation: process, environment_memory: 512MiB}",
        "{environment: 'a.py:A', environment_isolation: process, environment_memory: null}",
        "{environment: 'a.py:A', max_tool_calling_iterations: 1, endpoint_url: null, max_rollout_tokens: null}",
        "{loss_type: cispo, epsilon_high: 5}",
        "{loss_type: 'rl_vlm.algorithm.losses:clipped_loss', epsilon: 0.1, epsilon_high: 0.3, delta: 2}",
        "{loss_type: 'rl_vlm.algorithm.losses:cispo_loss', epsilon_high: 5, loss_normalizer: window}",
        "{loss_type: 'no/such_file.py:loss', epsilon: 0.1, delta: 1.1, loss_weights: completion}",
        "{output_dir: runs/a~b}",
        "{lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 2}}",
    ],
)
def test_combinations_that_agree(write, settings):
    load_config(write(settings), ["model_name_or_path=tiny"])


@pytest.mark.parametrize("modules", ["[q_proj, v_proj]", r"'.*\.layers\.\d+\.mlp'"])
def test_lora_modules_are_names_or_a_pattern(write, modules):
    path = write("model_name_or_path: tiny")
    model = load_config(
        path, ["use_peft=true", f"lora_target_modules={modules}", f"lora_exclude_modules={modules}"]
    ).model
    assert model.lora_target_modules == model.lora_exclude_modules == yaml_text.parse(modules)


def test_an_evaluation_needs_held_out_data_and_rewards(write):
    path = write("model_name_or_path: tiny\n")
    with pytest.raises(ConfigError, match=r"(?s)eval_dataset_name.*reward_funcs"):
        check_evaluable(load_config(path))
    check_evaluable(load_config(path, ["eval_dataset_name=d", "reward_funcs=choice"]))


def test_training_needs_data_rewards_and_groups(write):
    path = write("model_name_or_path: tiny\nnum_generations: 1\n")
    with pytest.raises(ConfigError, match=r"(?s)dataset_name.*reward_funcs.*num_generations"):
        check_trainable(load_config(path))
    check_trainable(load_config(path, ["dataset_name=d", "reward_funcs=choice", "num_generations=2"]))


@pytest.mark.parametrize(
    "rewards",
    [
        ["reward_funcs=[{function: choice, weight: 0}]"],
        ["reward_funcs=[choice]", "reward_weights=[0]"],
        ["reward_funcs=[{function: choice, weight: 0}, {function: numeric, weight: 0}]"],
    ],
)
def test_training_needs_a_reward_with_a_weight(write, rewards):
    path = write("model_name_or_path: tiny\ndataset_name: d\nnum_generations: 2\n")
    with pytest.raises(ConfigError, match="every reward function has weight 0"):
        check_trainable(load_config(path, rewards))
    check_trainable(load_config(path, ["reward_funcs=[{function: choice, weight: 0}, numeric]"]))


def test_an_environment_may_be_the_only_reward(write):
    path = write("model_name_or_path: tiny\ndataset_name: d\neval_dataset_name: d\nenvironment: game.py:Game\n")
    for rewards in ([], ["reward_funcs=[{function: choice, weight: 0}]"]):
        check_trainable(load_config(path, rewards))
        check_evaluable(load_config(path, rewards))
    with pytest.raises(ConfigError, match="reward_funcs` is empty: training needs"):
        check_trainable(load_config(path, ["environment=null", "tools=game.py:crop"]))


def test_loading_imports_no_torch(write):
    program = "import sys; from rl_vlm.config.load import load_config; load_config(sys.argv[1]); print(*sys.modules)"
    path = write("model_name_or_path: tiny")
    run = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert {"torch", "numpy", "transformers", "trl"}.isdisjoint(run.stdout.split())
