"""Tables of docs/support.md, families.md and environments.md, made from lists of the code and tests, and from checks.

python -m tests.helpers.support_tables    # write them again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rl_vlm.config.engines import ENGINES
from rl_vlm.config.load import FULL_NAMES, check_trainable
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.setup import setup_problems
from rl_vlm.distributed.shardings import SHARDINGS, UNSHARDED, Sharding
from rl_vlm.errors import RLVLMError
from rl_vlm.model.families import FAMILIES
from rl_vlm.model.family import positions_after_videos
from rl_vlm.model.remote.kinds import OWN_KINDS
from tests.gpu import test_shared_attention
from tests.helpers.family_parity import CASES, NOT_THIS
from tests.helpers.pages import ROOT
from tests.helpers.tiers import FAST_FAMILIES, OWN_CODE_PATHS
from tests.integration import test_equal_calls, test_sharding_families
from tests.tiny.build import ALL_FAMILIES

PAGE = ROOT / "docs" / "support.md"
FAMILIES_PAGE = ROOT / "docs" / "families.md"
ENVIRONMENTS_PAGE = ROOT / "docs" / "environments.md"
VIDEO_FORMS = {
    "patches": "frames in the model's own input for videos, in one run of the tower with images",
    "images": "frames among images, with text that its processor writes",
    None: "frames as images, each after its time (`0.5 s: `)",
}
"""How a model gets videos, by the value of `Family.videos`."""
YES, NO = "yes", "–"
CONDITIONS: dict[str, Any] = {
    "model_name_or_path": "model", "dataset_name": "rows.jsonl", "reward_funcs": ["exact_match"],
    "prompts_per_step": 8, "output_dir": "runs/table",
}  # fmt: skip
LORA = {"use_peft": True}
ENGINE_FEATURES: dict[str, dict[str, Any]] = {
    "full fine-tuning": {},
    "LoRA (`use_peft`)": LORA,
    "QLoRA (`load_in_4bit`)": LORA | {"load_in_4bit": True},
    "several updates per rollout (`num_iterations`)": {"num_iterations": 4},
    "KL term (`beta`)": {"beta": 0.04},
    "`top_p`, `top_k`, `min_p` in training": {"top_p": 0.9},
    "partial rollouts (`max_rollout_tokens`)": {"max_rollout_tokens": 64},
    "prompts sampled again (`max_resampling_rounds`)": {"max_resampling_rounds": 2},
    "sampling during training (`max_staleness`)": {"max_staleness": 1},
    "correction of the mismatch (`vllm_importance_sampling_mode`)": {"vllm_importance_sampling_mode": "token_mask"},
    "adapter sent by itself or merged (`lora_sync`)": LORA | {"lora_sync": "merge"},
    "weights gathered layer by layer (`ds3_gather_for_generation`)": {"ds3_gather_for_generation": False},
    "one model over several GPUs (`vllm_tensor_parallel_size`)": {"vllm_tensor_parallel_size": 2},
    "memory freed during training (`vllm_enable_sleep_mode`)": {"vllm_enable_sleep_mode": True},
    "servers elsewhere (`vllm_server_base_url`)": {"vllm_server_base_url": ["http://node:8000"]},
}
"""Settings that ask an engine for something."""
SHARDING_FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": LORA,
    "LoRA, `pissa`": LORA | {"init_lora_weights": "pissa"},
    "QLoRA": LORA | {"load_in_4bit": True},
    "8-bit AdamW": {"optim": "adamw_8bit"},
    "Adafactor": {"optim": "adafactor"},
    "KL term": {"beta": 0.04},
    "engine `vllm`": {"engine": "vllm"},
    "engine `vllm_server`": {"engine": "vllm_server"},
}
"""Settings that ask a sharding for something."""


def configured(settings: dict[str, Any]) -> RunConfig:
    """Build the settings of a run that can be trained. Raises ConfigError if they cannot be used together."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in (CONDITIONS | settings).items():
        sections.setdefault(FULL_NAMES[name].split(".")[0], {})[name] = value
    config = RunConfig.model_validate(sections)
    check_trainable(config)
    return config


def accepted(settings: dict[str, Any], sharding: Sharding = UNSHARDED) -> str:
    """Return whether two processes with a sharding accept the settings, as a cell of a table."""
    try:
        setup_problems(configured(settings), sharding, num_ranks=2).refuse()
    except (RLVLMError, ValueError):
        return NO
    return YES


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def family_row(family: str) -> list[str]:
    """Return the row of a family: the cases of its tests, how it is sharded, and which tests it has."""
    cases = [NO if (family, case) in NOT_THIS else YES for case in CASES]
    trained = family in test_sharding_families.FAMILIES
    sharded = NO if family in test_equal_calls.UNSHARDABLE else "trained" if trained else "same calls"
    tier = "every change" if family in FAST_FAMILIES else "most in CI" if family in OWN_CODE_PATHS else "part in CI"
    return [f"`{family}`", *cases, sharded, YES if family in test_shared_attention.FAMILIES else NO, tier]


def families() -> str:
    head = ["tiny model", *CASES, "ZeRO-3, FSDP2", "GPU tests", "tests"]
    return markdown(head, map(family_row, sorted(ALL_FAMILIES)))


def engines() -> str:
    rows = [
        [feature, *(accepted({"engine": engine} | settings) for engine in ENGINES)]
        for feature, settings in ENGINE_FEATURES.items()
    ]
    return markdown(["a run with", *(f"`{engine}`" for engine in ENGINES)], rows)


def shardings() -> str:
    rows = [
        [f"`{name}`", *(accepted(settings, sharding) for settings in SHARDING_FEATURES.values())]
        for name, sharding in SHARDINGS.items()
    ]
    return markdown(["two processes with", *SHARDING_FEATURES], rows)


def videos() -> str:
    """Return how each model gets videos, from the rows of the table of families."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, family in FAMILIES.items():
        if family.videos:
            token = "an image's" if family.video_token == family.image_token or family.videos == "images" else "its own"
            after = "largest position + 1" if family.row_positions is positions_after_videos else "the model's"
            most = {0: "frames as images", 1: "one in a prompt"}.get(family.videos_in_vllm, "any number")
            alike.setdefault((VIDEO_FORMS[family.videos], token, after, most), []).append(f"`{name}`")
    rows = [[", ".join(names), *facts] for facts, names in alike.items()]
    rows.append(
        ["all others, and types without a row", VIDEO_FORMS[None], "an image's", "the model's", "frames as images"]
    )
    return markdown(["`model_type`", "a video is", "placeholder token", "text after it starts at", "in vLLM"], rows)


def first_images() -> str:
    """Return why models take images in the first prompt alone, from the table of families and adapters of own code."""
    reasons = {name: family.first_images_only for name, family in FAMILIES.items()}
    reasons |= {name: getattr(kind.before, "first_images_only", None) for name, kind in OWN_KINDS.items()}
    rows = [[f"`{name}`", reason] for name, reason in reasons.items() if reason is not None]
    return markdown(["`model_type`, or class of own code", "images are in the first prompt alone, since"], rows)


TABLES = {"families": families, "engines": engines, "shardings": shardings}
"""The tables of docs/support.md."""
FAMILY_TABLES = {"videos": videos}
"""Those of docs/families.md."""
ENVIRONMENT_TABLES = {"first images": first_images}
"""Those of docs/environments.md."""


def with_tables(page: str, tables: dict[str, Callable[[], str]] = TABLES) -> str:
    """Return the page with each table made again, between the comments that name it."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        after = rest.split(end)[1]
        page = f"{before}{begin}\n\n{table()}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
    FAMILIES_PAGE.write_text(with_tables(FAMILIES_PAGE.read_text(), FAMILY_TABLES))
    ENVIRONMENTS_PAGE.write_text(with_tables(ENVIRONMENTS_PAGE.read_text(), ENVIRONMENT_TABLES))
