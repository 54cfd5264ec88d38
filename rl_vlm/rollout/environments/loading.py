"""Loading of the tools and environments that settings name."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rl_vlm.config.schema import RolloutConfig
from rl_vlm.data.tool_calls import schema_of
from rl_vlm.errors import ConfigError
from rl_vlm.functions import LIVE, LoadError, load_function
from rl_vlm.rollout.environments.adapters import ADAPTERS, VERL, verl_tool
from rl_vlm.rollout.environments.contract import EnvironmentKind, Schema, Toolbox, describe, load_environment
from rl_vlm.rollout.environments.failures import ToolFailure
from rl_vlm.rollout.environments.hosts import Host, InThread
from rl_vlm.rollout.environments.processes import InProcess, load_answers
from rl_vlm.rollout.environments.threads import CallThread


def load_toolbox(rollout: RolloutConfig) -> Toolbox:
    """Load the tools and environments of a run. Raises ConfigError with all problems at once."""
    problems: list[str] = []
    functions, schemas = load_tools(rollout.tools, problems)
    given = rollout.environment
    named: dict[str | None, str | None] = {**given} if isinstance(given, dict) else {None: given}
    kinds: dict[str | None, EnvironmentKind] = {}
    for name, source in named.items():
        if source is not None and (kind := load_kind(source, rollout, problems)) is not None:
            kinds[name] = kind
            problems += [
                f"rollout.environment: {source} has a tool {tool!r}, and so has rollout.tools; rename one"
                for tool in kind.tools
                if tool in functions
            ]
    toolbox = Toolbox(functions, schemas, with_own_names(kinds, named))
    if problems:
        toolbox.close()
        raise ConfigError("\n".join(problems))
    return toolbox


def with_own_names(
    kinds: Mapping[str | None, EnvironmentKind], sources: Mapping[str | None, str | None]
) -> dict[str | None, EnvironmentKind]:
    """Name environments as the data does if others from another source have the same name."""
    sharing: dict[str, set[str | None]] = {}
    for key, kind in kinds.items():
        sharing.setdefault(kind.name, set()).add(sources[key])
    return {key: kind if len(sharing[kind.name]) == 1 else replace(kind, label=key) for key, kind in kinds.items()}


def load_tools(sources: Sequence[str], problems: list[str]) -> tuple[dict[str, Callable[..., Any]], list[Schema]]:
    """Load functions and their schemas. Add problems to the list."""
    functions: dict[str, Callable[..., Any]] = {}
    schemas: list[Schema] = []
    for source in sources:
        try:
            function = verl_tool(source.removeprefix(VERL)) if source.startswith(VERL) else load_function(source)
            schema = schema_of(function)
        except (LoadError, ImportError, ValueError) as error:
            problems.append(f"rollout.tools: {source}: {error}")
            continue
        name = schema["function"]["name"]
        if name in functions:
            problems.append(f"rollout.tools: two tools are called {name!r}; rename one")
        functions[name] = function
        schemas.append(schema)
    return functions, schemas


def load_kind(source: str, rollout: RolloutConfig, problems: list[str]) -> EnvironmentKind | None:
    """Load an environment, and make its first instance. If it cannot be used, add the reasons to `problems`."""
    where, takes_steps = f"rollout.environment: {source}", rollout.environment_protocol == "steps"
    if source.partition(":")[0] in ADAPTERS and not takes_steps:
        problems.append(f"{where} takes steps; set rollout.environment_protocol to steps")
        return None
    try:
        make = host_maker(source, rollout)
    except LoadError as error:
        problems.append(f"{where}: {error}")
        return None
    try:
        kind = kind_of(make, takes_steps)
    except ToolFailure as failure:
        how = "with rollout.environment_kwargs" if rollout.environment_kwargs else "without arguments"
        problems.append(f"{where} cannot be made {how}: {failure.message}")
        return None
    if kind.description.problems:
        kind.first.kill()
        problems += [f"{where}: {problem}" for problem in kind.description.problems]
        return None
    return kind


def kind_of(make: Callable[[], Host], takes_steps: bool = False) -> EnvironmentKind:
    """Make the first instance, and describe its class. Raises ToolFailure if it cannot be made."""
    thread, first = CallThread(), make()
    call = first.queued(partial(describe, takes_steps=takes_steps))
    thread.put(call.run)
    try:
        return EnvironmentKind(make, first, thread, call.result(math.inf), takes_steps)
    except BaseException:
        first.kill()
        thread.end()
        raise


def host_maker(source: str, rollout: RolloutConfig) -> Callable[[], Host]:
    """Return the function that makes hosts of an environment. Raises LoadError if it cannot be loaded."""
    if rollout.environment_isolation == "thread":
        return partial(InThread, partial(load_environment(source), **rollout.environment_kwargs))
    load = partial(load_answers, source, rollout.environment_kwargs, in_session(source))
    return partial(
        InProcess, load, rollout.environment_bytes, f"rollout.environment_memory {rollout.environment_memory}"
    )


def in_session(source: str) -> Mapping[str, Callable[..., Any]]:
    """Return the object of the Python session that a source names, if it names one.

    Raises LoadError if other processes cannot have it.
    """
    if source not in LIVE:
        return {}
    try:
        pickle.dumps(LIVE[source])
    except Exception as error:
        raise LoadError(
            "rollout.environment_isolation is process, and another process cannot have this object of the session "
            f"({error}); write a class at the top level of a file, and name it as `file.py:Class`"
        ) from error
    return {source: LIVE[source]}
