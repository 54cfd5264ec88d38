"""`--dry-run`: show the resolved settings, the checks, and all problems at once."""

from __future__ import annotations

from collections.abc import Sequence

from rl_vlm.config.describe import describe
from rl_vlm.config.schema import RunConfig
from rl_vlm.evaluation.options import NO_OPTIONS, EvaluationOptions
from rl_vlm.tools.checks.diagnosis import collect
from rl_vlm.tools.checks.settings import batches
from rl_vlm.tools.checks.table import Purpose, Subject
from rl_vlm.tools.checks.text import comments


def dry_run(
    config: RunConfig, kind: Purpose, checkpoints: Sequence[str] = (), options: EvaluationOptions = NO_OPTIONS
) -> tuple[str, list[str]]:
    """Return the text that describes a run, and its problems.

    `checkpoints` and `options` belong to an evaluation.
    """
    subject = Subject(config, kind, checkpoints=checkpoints, options=options)
    found = collect(subject.run_checks())
    return describe(config, subject.value(batches)) + comments(found), found.texts("error")
