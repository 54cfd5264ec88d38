import ast
import dataclasses
from pathlib import Path

import pytest

from rl_vlm.config import trl_fields
from rl_vlm.config.load import FULL_NAMES
from rl_vlm.config.rules import UNREAD
from rl_vlm.config.schema import SECTIONS, SETTINGS, DataSource, RewardSpec
from rl_vlm.model.families import FAMILIES
from rl_vlm.model.files import MODEL_TYPES

ROOT = Path(__file__).parents[2]


def test_leaf_names_are_unique():
    leaves = sorted(setting.split(".")[1] for setting in SETTINGS)
    assert leaves == sorted(set(leaves))


def test_every_setting_has_a_docstring():
    fields = {**SETTINGS, **RewardSpec.model_fields, **DataSource.model_fields}
    assert [name for name, field in fields.items() if not field.description] == []


def settings_read(code: ast.AST) -> set[str]:
    """`Class.leaf` of what is read from something that is named after its section, or annotated with its class."""
    holders = {(section, model.__name__) for section, model in SECTIONS.items()}
    for node in ast.walk(code):
        match node:
            case (
                ast.arg(arg=name, annotation=ast.Name(id=annotation))
                | ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id=annotation))
            ):
                holders.add((name, annotation))
    read = set()
    for node in ast.walk(code):
        match node:
            case ast.Attribute(value=ast.Name(id=holder) | ast.Attribute(attr=holder), attr=leaf):
                read |= {f"{model}.{leaf}" for name, model in holders if name == holder}
    return read


def test_every_setting_is_read():
    code = [path for folder in ("rl_vlm", "launch") for path in (ROOT / folder).rglob("*.py")]
    readers = [path for path in code if path.name not in ("schema.py", "rules.py", "describe.py")]
    read = set().union(*(settings_read(ast.parse(path.read_text())) for path in readers))
    models = (*SECTIONS.values(), RewardSpec, DataSource)
    settings = {f"{model.__name__}.{leaf}" for model in models for leaf in model.model_fields}
    assert sorted(settings - read) == []


READ_BY_EVERY_RUN = set(
    """
    model_name_or_path trust_remote_code dtype attn_implementation fused freeze_vision_tower trainable_modules use_peft
    load_in_4bit verify
    dataset_name eval_dataset_name columns ignore_columns text_only on_bad_row
    prompt_template system_prompt image_root video_root chat_template_kwargs max_prompt_length
    min_pixels max_pixels max_image_pixels
    fps num_frames min_frames max_frames video_min_pixels video_max_pixels video_total_pixels max_video_seconds
    video_format
    shuffle_dataset dataloader_num_workers
    engine num_generations max_completion_length temperature top_p top_k min_p max_num_seqs max_resampling_rounds
    tools environment
    reward_funcs reward_weights max_fault_fraction
    loss_type importance_sampling_level beta scale_rewards num_iterations mask_truncated_completions
    top_entropy_quantile turn_advantages
    output_dir overwrite_output_dir resume_from_checkpoint seed prompts_per_step per_device_train_batch_size
    gradient_accumulation_steps steps_per_generation num_train_epochs max_steps learning_rate lr_scheduler_type
    optim weight_decay max_grad_norm save_steps save_total_limit async_save eval_on_start
    stop_grace_seconds lost_rank_seconds ddp_timeout
    endpoint_url micro_batch_tokens prefix_sharing activation_offloading expandable_segments
    report_to log_completions num_completions_to_print report disable_tqdm memory_profile
    """.split()
)
"""Settings that always have an effect, or ask for what holds anyway, such as a frozen tower without an adapter."""

REFUSED_ELSEWHERE = {
    # in CONFLICTS, with what they need
    "sync_ref_model", "max_staleness", "max_rollout_tokens", "vllm_importance_sampling_correction",
    "lr_scheduler_kwargs", "eval_steps", "load_best_model_at_end",
    # where the checkpoint is opened
    "model_revision",
}  # fmt: skip


def test_of_every_setting_it_is_known_when_it_has_no_effect():
    of_vllm = set(SECTIONS["vllm"].model_fields)
    listed = {name for row in UNREAD for name in row.names.split()}
    assert READ_BY_EVERY_RUN.isdisjoint(listed | REFUSED_ELSEWHERE | of_vllm)
    assert READ_BY_EVERY_RUN | listed | REFUSED_ELSEWHERE | of_vllm == set(FULL_NAMES)


def test_settings_named_in_the_trl_table_exist():
    assert trl_fields.SAME.issubset(FULL_NAMES)


def test_the_trl_table_has_each_field_once():
    trl = pytest.importorskip("trl", reason="needs trl to list its fields")
    from trl.scripts.grpo import GRPOScriptArguments

    defaults = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for arguments in (trl.GRPOConfig, trl.ModelConfig, GRPOScriptArguments)
        for field in dataclasses.fields(arguments)
    }
    absent = [name for fields in trl_fields.NOT_HERE.values() for name in fields]
    assert sorted([*trl_fields.SAME, *trl_fields.CONVERTED, *absent]) == sorted(defaults)
    assert set(trl_fields.OLD_NAMES).isdisjoint(defaults)

    def refused(name: str) -> bool:
        try:
            return trl_fields.translate(name, defaults[name], {}) is None
        except ValueError:
            return True

    assert [name for name in absent if refused(name)] == ["lora_dropout"]


def test_the_families_that_a_dry_run_knows_are_the_supported_ones():
    assert set(FAMILIES) == MODEL_TYPES
