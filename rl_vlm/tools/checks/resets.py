"""Reset each environment twice before a run, and compare how completions would start."""

from __future__ import annotations

from rl_vlm.errors import DataError, Finding
from rl_vlm.rollout.environments.contract import EnvironmentKind, Toolbox
from rl_vlm.rollout.environments.failures import ToolFailure
from rl_vlm.rollout.environments.instances import Instance
from rl_vlm.rollout.environments.starts import digests_of, offered, own_copy
from rl_vlm.tools.checks.diagnosis import Checking, Note, attempt
from rl_vlm.tools.checks.environments import toolbox
from rl_vlm.tools.checks.model import Prompts, prompts
from rl_vlm.tools.checks.table import Subject
from rl_vlm.types import RolloutRequest

FAILS = "Fix the environment: its completions would be masked."
UNLIKE = (
    "Use the argument `seed` in `reset`: it is the same for all completions of a group. Ignore this if starts should "
    "differ."
)


def resets(subject: Subject) -> Checking[None]:
    """Reset each environment twice on the first row that uses it."""
    box, found = subject.value(toolbox), subject.value(prompts)
    if box is None:
        return
    for kind in box.kinds.values():
        if found is None:
            yield Note(f"environment {kind.name}: there are no prompts", is_checked=False)
        else:
            yield from attempt(reset_twice(subject, box, kind, found))


def reset_twice(subject: Subject, box: Toolbox, kind: EnvironmentKind, found: Prompts) -> Checking[None]:
    """Yield a finding if `reset` fails, or if it returns unlike contents for one row and one seed."""
    rows, indices = found.train.rows, found.train.indices
    row = next((row for row in indices if box.kind_of(rows.parse(row).columns) is kind), None)
    if row is None:
        yield Note(f"environment {kind.name}: no training row uses it", is_checked=False)
        return
    where = f"reset of {kind.name} on {rows.place(row)}"
    try:
        first, second = reset_digests(subject, kind, found, row)
    except (ToolFailure, DataError) as error:
        yield Finding("error", "environment that fails", f"{where}: {error}", FAILS)
        return
    if first != second:
        what = f"{where} returns different content for the same seed: completions of a group would start differently"
        yield Finding("warning", "unlike starts", what, UNLIKE)
    yield Note(f"two times {where}")


def reset_digests(subject: Subject, kind: EnvironmentKind, found: Prompts, row: int) -> list[tuple[str | None, ...]]:
    """Return digests of the contents of two resets, None without content.

    Raises ToolFailure if a reset fails or its content cannot be read, and DataError if the row has no prompt.
    """
    config = subject.config
    request = RolloutRequest("doctor", found.builder.build(found.train.rows[row]))
    arguments = kind.reset_arguments(offered(request, config.train.seed), request.prompt.sample.columns)
    instance, digests = Instance(kind, kind.first, kind.thread), []
    try:
        for _ in range(2):
            calls = instance.start(own_copy(arguments), config.data.max_image_pixels, found.builder.frame_rule)
            digests.append(digests_of([instance.finish(call, config.rollout.tool_timeout) for call in calls]))
    finally:
        instance.close()
    return digests
