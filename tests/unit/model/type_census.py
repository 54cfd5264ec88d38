"""What becomes of every image-text type of the installed transformers.

python -m tests.unit.model.type_census              trains tiny models of types without a row, and writes the list of
                                                    docs/families.md
python -m tests.unit.model.type_census emu3 fuyu    writes the lines of these types again
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as TYPES

from rl_vlm.errors import ModelError, RLVLMError, shorten
from rl_vlm.log.starts import read_starts
from rl_vlm.model.derived import derived_family
from rl_vlm.model.families import FAMILIES
from rl_vlm.passes.proof import SHARED
from rl_vlm.run.run import train
from tests.helpers.builders import sharp_checkpoint
from tests.helpers.tiny_run import make_config
from tests.tiny.rare import CONFIGS
from tests.tiny.unlisted import UNLISTED

PAGE = Path("docs/families.md")
BEGINS, ENDS = "<!-- types: begin -->", "<!-- types: end -->"
OTHER_KINDS = {"hybrid": "a form of vipllava"}
"""Names of tiny models that are no type."""
MISSING = {"model": "cannot be created", "token of images": "name the token of images"}
"""Reasons that default configs give, and checkpoints may not."""


def outcome_of_training(name: str) -> str:
    """Train the tiny model of a type for a step, and return what the proof says."""
    with TemporaryDirectory() as folder:
        checkpoint = sharp_checkpoint(name, Path(folder) / "model")
        try:
            train(make_config(checkpoint, Path(folder) / "run", max_steps=1))
        except RLVLMError as error:
            return refused(error)
        proof = read_starts(Path(folder) / "run")[-1]["proof"]
        is_shared = proof["fallback"] is None and any(each["check"].startswith(SHARED) for each in proof["checks"])
        return "proven, with shared rows" if is_shared else "proven, with dense rows"


def outcome_of_facts(model_type: str) -> str:
    """Derive the facts of a type that has no tiny model, from a tiny config or its default one."""
    try:
        derived_family(CONFIGS[model_type]() if model_type in CONFIGS else AutoConfig.for_model(model_type))
    except ModelError as error:
        missing = next((what for what, said in MISSING.items() if said in str(error)), None)
        return f"not tried: no default {missing}" if missing and model_type not in CONFIGS else refused(error)
    except Exception as error:  # of the config's own code
        return f"not tried: no default config ({type(error).__name__})"
    return "not tried: no tiny model"


def refused(error: RLVLMError) -> str:
    reason = str(error).split("is not supported: ")[-1].split("Sample row-0: ")[-1]
    return "refused: " + shorten(reason.replace("|", "/"), 160)


def outcomes(known: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what becomes of each type: what is known, or else what a trial finds."""
    for model_type in sorted(TYPES):
        if model_type in FAMILIES:
            yield model_type, "row"
        elif model_type in known:
            yield model_type, known[model_type]
        else:
            yield model_type, (outcome_of_training if model_type in UNLISTED else outcome_of_facts)(model_type)


def listed(page: str) -> dict[str, str]:
    """Return the lines of the page's list, by type."""
    lines = page.split(BEGINS)[1].split(ENDS)[0].strip().splitlines()[2:]
    return dict(re.findall(r"\| `(\S+)` \| (.+) \|", "\n".join(lines)))


def written(page: str, found: dict[str, str]) -> str:
    """Return the page with the list between its markers."""
    before, rest = page.split(BEGINS)
    lines = ["| `model_type` | what becomes of it |", "|---|---|"]
    lines += [f"| `{name}` | {what} |" for name, what in found.items() if what != "row"]
    return "\n".join([before + BEGINS, "", *lines, "", ENDS]) + rest.split(ENDS)[1]


def main(types: list[str]) -> None:
    logging.disable(logging.CRITICAL)
    known = {name: what for name, what in listed(PAGE.read_text()).items() if name not in types} if types else {}
    found = dict(outcomes(known))
    PAGE.write_text(written(PAGE.read_text(), found))
    for kind in ("row", "proven", "refused", "not tried"):
        print(kind, sum(what.startswith(kind) for what in found.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
