"""Read a script or a YAML file of VLM-R1, EasyR1, verl or ms-swift: its system and its settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl_vlm.config import yaml_text
from rl_vlm.config.schema import SECTIONS
from rl_vlm.config.secrets import without_secrets
from rl_vlm.errors import ConfigError, shorten
from rl_vlm.tools.migrate.shell import SETS_VARIABLES, Command, Script, Word

PROGRAMS = {
    "VLM-R1": re.compile(r"\bopen_r1/[\w/-]+\.py(?= |$)|\bgrpo_(?:jsonl|rec)\.py(?= |$)"),
    "EasyR1": re.compile(r"\bverl\.trainer\.main(?= |$)"),
    "verl": re.compile(r"\b(?:main_ppo|main_dapo)(?:\.py)?(?= |$)"),
    "ms-swift": re.compile(r"\bswift rlhf(?= |$)|\brlhf\.py(?= |$)"),
}
"""The program of a command, as its words separated by spaces."""
KEYS = {
    "VLM-R1": {"data_file_paths", "image_folders", "reward_method", "is_reward_customized_from_vlm_module"},
    "EasyR1": {"worker"},
    "verl": {"actor_rollout_ref"},
    "ms-swift": {"rlhf_type", "train_type", "tuner_type", "external_plugins"},
}
"""Settings that only one system has. Of nested keys the first part counts."""
SYSTEMS = tuple(KEYS)
NESTED_SYSTEMS = ("EasyR1", "verl")
CONTROL = ("if", "elif", "else", "for", "while", "case", "until", "function")
"""Words of the shell after which commands run conditionally or several times."""
ARGUMENTS = ("${@}", "${*}")
LAUNCHERS = re.compile(r"(?:^|/)(?:accelerate|deepspeed|torchrun)$")
ENVIRONMENT = {
    "MAX_PIXELS": "max_pixels", "MIN_PIXELS": "min_pixels", "FPS": "fps", "NFRAMES": "num_frames",
    "FPS_MIN_FRAMES": "min_frames", "FPS_MAX_FRAMES": "max_frames", "VIDEO_MIN_PIXELS": "video_min_pixels",
    "VIDEO_MAX_PIXELS": "video_max_pixels", "VIDEO_TOTAL_PIXELS": "video_total_pixels",
}  # fmt: skip
"""Environment variables of ms-swift, and settings here."""


@dataclass(frozen=True)
class Item:
    """A setting of a script or a file."""

    key: str
    value: Any
    place: str = ""
    """The line, such as `line 7`, or the name of another file."""
    unfilled: tuple[str, ...] = ()
    """Parts of the value that are not known."""
    has_value: bool = True
    """Whether a value is written. A flag without one is true."""

    def __str__(self) -> str:
        value = f" {yaml_text.one_line(self.value)}" if self.has_value else ""
        text = shorten(without_secrets(f"{self.key}:{value}" if value else self.key), 120)
        return f"{self.place}: {text}" if self.place else text


@dataclass
class Original:
    """The settings of a script or a file."""

    system: str
    items: list[Item] = field(default_factory=list)
    launch: dict[str, int] = field(default_factory=dict)
    """Machines and GPUs as options of `rl-vlm launch`, if they are written."""
    processes: int | None = None
    """Processes that train, if they are written."""
    needless: list[str] = field(default_factory=list)
    """Parts without a meaning here."""
    doubts: list[str] = field(default_factory=list)
    """Parts that were not read, with a remedy."""

    @property
    def is_nested(self) -> bool:
        return self.system in NESTED_SYSTEMS


def read(text: str, path: str, system: str | None) -> Original:
    """Read the settings of a script or a YAML file. `system` names the system of the file. If it is None, the content
    shows the system.

    Raises ConfigError if the system is not clear, or if the file is not a valid file of this system.
    """
    if not text.strip():
        raise ConfigError(f"{path}: it is empty; give a script or a YAML file of {_or(SYSTEMS)}")
    if path.endswith((".yaml", ".yml")) or (not _has_program(text) and _is_mapping(text)):
        return _from_yaml(text, path, system)
    return _from_script(text, path, system)


def _has_program(text: str) -> bool:
    return any(pattern.search(" ".join(text.split())) for pattern in PROGRAMS.values())


def _is_mapping(text: str) -> bool:
    try:
        return isinstance(yaml_text.parse(text), dict)
    except yaml.YAMLError:
        return False


def _from_yaml(text: str, path: str, system: str | None) -> Original:
    content = _mapping(text, path)
    ours = [key for key in content if key in SECTIONS and isinstance(content[key], dict)]
    if ours and not system and not _of_keys(content):
        raise ConfigError(f"{path}: `{ours[0]}` is a section of rl-vlm's own files: run `rl-vlm train {path}`")
    source = Original(system or _the_one(_of_keys(content), path))
    source.items = list(_items_of(content, source.is_nested))
    _include(source, path)
    return source


def _mapping(text: str, path: str) -> dict[str, Any]:
    try:
        content = yaml_text.parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected `key: value` settings, found {shorten(repr(content), 80)}")
    return {str(key): value for key, value in content.items()}


def _of_keys(keys: Iterable[str]) -> list[str]:
    """Return the systems that have one of the keys. Keys of ms-swift and VLM-R1 may be written with hyphens."""
    first = {key.partition(".")[0].replace("-", "_") for key in keys}
    return [system for system, own in KEYS.items() if first & own]


def _the_one(systems: list[str], path: str) -> str:
    """Return the only system, or raise ConfigError."""
    if len(systems) == 1:
        return systems[0]
    found = f"it could be for {_or(systems)}" if systems else f"it is not clear that it is for {_or(SYSTEMS)}"
    advice = "" if systems else ". A file of TRL needs no translation: run `rl-vlm train FILE`"
    raise ConfigError(f"{path}: {found}; say it with --from NAME, one of {', '.join(SYSTEMS)}{advice}")


def _or(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _items_of(content: Mapping[str, Any], is_nested: bool, place: str = "") -> Iterator[Item]:
    """Yield the settings of a YAML file. Null is a default. A reference `${a.b}` is replaced by its value."""
    try:
        flat = dict(_flattened(content)) if is_nested else dict(content)
    except RecursionError as error:
        raise ConfigError("the YAML refers to itself, or is nested too deeply") from error
    for key, value in flat.items():
        for _ in range(len(flat)):  # a reference to a reference
            reference = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
            value = flat[reference[1]] if reference and reference[1] in flat else value
        unfilled = re.findall(r"\$\{[^}]*\}+|<[A-Za-z][^<>]*>", value) if isinstance(value, str) else []
        if value is not None and value != "???":
            yield Item(key, value, place, tuple(unfilled))


def _flattened(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _from_script(text: str, path: str, system: str | None) -> Original:
    script = Script(text, path)
    commands = script.commands()
    found = [(name, command) for command in commands for name in _systems_of(command) if system in (None, name)]
    if system and not found:  # a program of one's own
        found = [(system, command) for command in commands if len(_arguments(command, system)) > 1]
        found = sorted(found, key=lambda pair: len(pair[1].words))[-1:]
    if len(found) > 1 and len({name for name, _ in found}) == 1:
        lines = " and ".join(str(command.line) for _, command in found)
        raise ConfigError(f"{path}: it starts training several times, in lines {lines}; give a file for each")
    source = Original(_the_one([name for name, _ in found], path))
    training = found[0][1]
    exported: dict[str, Word] = {}
    for command in commands:
        exported |= command.variables(["export"])
    exported |= training.environment
    if any(word.text in ARGUMENTS for word in training.words):
        training.words = [word for word in training.words if word.text not in ARGUMENTS]
        source.needless.append("$@, the arguments of the script")
    source.items = _once(_arguments(training, source.system), path, source.is_nested)
    _read_environment(source, exported)
    _read_launcher(source, training, exported)
    _read_other_commands(source, [command for command in commands if command is not training])
    _include(source, path)
    return source


def _systems_of(command: Command) -> list[str]:
    """Return the systems whose program a command starts, or else the systems whose settings it has."""
    line = _line(command)
    systems = [system for system, pattern in PROGRAMS.items() if pattern.search(line)]
    if systems or len(command.words) < 3 or command.words[0].text.startswith("-"):
        return systems
    return _of_keys(re.findall(r"(?: --| \+{0,2})([\w.-]+)(?==| )", line))


def _arguments(command: Command, system: str) -> list[Item]:
    """Return the settings of a command, after the program: `--flag values`, or `key=value` for nested systems."""
    before = len(_launcher(command, system))
    words = command.words[before:]
    return list(_overrides(words) if system in NESTED_SYSTEMS else _flags(words))


def _launcher(command: Command, system: str) -> list[Word]:
    """Return the words of a command up to its program, or to a script of the user's own."""
    line = _line(command)
    match = PROGRAMS[system].search(line) or re.search(r"\S+\.py(?= |$)", line)
    return command.words[: line[: match.end()].count(" ") + 1 if match else 1]


def _line(command: Command) -> str:
    """Join the words of a command with spaces. White space within words becomes underscores."""
    return " ".join(re.sub(r"\s", "_", word.text) for word in command.words)


def _overrides(words: Iterable[Word]) -> Iterator[Item]:
    """Yield the settings of `key=value`, `+key=value` and `++key=value`."""
    for word in words:
        key, equals, text = word.text.lstrip("+").partition("=")
        if not equals or word.text.startswith("-"):
            yield Item(word.text, None, f"line {word.line}", word.unfilled, has_value=False)
        elif not text:
            raise ConfigError(f"line {word.line}: `{key}=` has no value; write `{key}=null` for the default")
        else:
            yield Item(key, _value(text), f"line {word.line}", word.unfilled)


def _flags(words: Iterable[Word]) -> Iterator[Item]:
    """Yield the settings of `--flag`, `--flag=value` and `--flag value value`."""
    groups: list[list[Word]] = []
    for word in words:
        if word.text.startswith("--"):
            name, equals, text = word.text.partition("=")
            groups.append([word._replace(text=name), *([word._replace(text=text)] if equals else [])])
        elif groups:
            groups[-1].append(word)
        else:
            key = "config" if word.text.endswith((".yaml", ".yml", ".json")) else word.text
            yield Item(key, word.text, f"line {word.line}", word.unfilled, has_value=key == "config")
    for flag, *values in groups:
        key = flag.text.removeprefix("--").replace("-", "_")
        unfilled = tuple(name for word in (flag, *values) for name in word.unfilled)
        several = [_value(word.text) for word in values]
        value = True if not several else several[0] if len(several) == 1 else several
        yield Item(key, value, f"line {flag.line}", tuple(dict.fromkeys(unfilled)), has_value=bool(values))


def _value(text: str) -> Any:
    """Return a value of the command line: YAML if it is a number, a truth value or a list, else the text."""
    if text == "None":
        return None
    try:
        value = yaml_text.parse(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float | list | None) else text


def _once(items: Iterable[Item], path: str, is_nested: bool) -> list[Item]:
    """Return the items without repetitions. Raises ConfigError if one is given twice with different values."""
    found: dict[str, Item] = {}
    for item in items:
        other = found.setdefault(item.key, item)
        if other.value != item.value:
            name = item.key if is_nested else f"--{item.key}"
            raise ConfigError(f"{path}: {other.place} and {item.place} both give `{name}`; keep one of them")
    return list(found.values())


def _read_environment(source: Original, exported: Mapping[str, Word]) -> None:
    """Add settings of environment variables. Name the others, without values, which may be secret."""
    for name, word in exported.items():
        if source.system == "ms-swift" and name in ENVIRONMENT:
            source.items.append(Item(ENVIRONMENT[name], _value(word.text), f"line {word.line}", word.unfilled))
        elif name not in ("NPROC_PER_NODE", "NNODES"):
            source.needless.append(f"${name}")


def _read_launcher(source: Original, training: Command, exported: Mapping[str, Word]) -> None:
    """Read the numbers of machines and processes. A script without a launcher has one process."""
    if source.is_nested:
        return
    words = _launcher(training, source.system)
    flags = [item for item in _flags(words[:-1]) if item.key not in ("config", *(word.text for word in words))]
    options = {item.key: item.value[0] if isinstance(item.value, list) else item.value for item in flags}
    per_node: Any = options.get("nproc_per_node", options.get("num_gpus"))
    nodes: Any = options.get("nnodes", 1)
    if "NPROC_PER_NODE" in exported:
        per_node = _value(exported["NPROC_PER_NODE"].text)
        nodes = _value(exported["NNODES"].text) if "NNODES" in exported else 1
    if "num_processes" in options:  # of accelerate: on all machines
        per_node = options["num_processes"]
    is_launched = LAUNCHERS.search(words[0].text)
    if per_node is None and not is_launched:
        per_node = 1
    if type(per_node) is int and type(nodes) is int:
        source.processes = per_node * nodes
        source.launch = {"--nodes": nodes, "--gpus": per_node} if source.processes > 1 else {}
    else:
        source.doubts.append("the number of processes is not written as a number, so batches are those of a process")
    known = ("nproc_per_node", "nnodes", "num_processes", "num_gpus")
    source.needless += [f"--{name}" for name in options if name not in known]


def _read_other_commands(source: Original, commands: Iterable[Command]) -> None:
    """Name the commands that do not train."""
    for command in commands:
        words = [word.text for word in command.words]
        if not words or words[0] in SETS_VARIABLES:
            continue
        if words[0].startswith("-") or "=" in words[0]:
            source.doubts.append(
                f"line {command.line}: `{shorten(words[0], 60)}` is not part of a command: the line before it ends "
                "without a backslash, or with a comment"
            )
        elif words[0] in CONTROL:
            source.doubts.append(f"line {command.line}: `{words[0]}` is not evaluated; every line was read once")
        else:
            source.needless.append(f"line {command.line} (`{words[0]}`)")


def _include(source: Original, path: str) -> None:
    """Add the settings of the file that `config` names. The command line wins."""
    named = next((item for item in source.items if item.key == "config"), None)
    if named is None:
        return
    source.items.remove(named)
    folders = [Path(), *Path(path).resolve().parents] if path != "-" else [Path()]
    file = next((folder / str(named.value) for folder in folders if (folder / str(named.value)).is_file()), None)
    if file is None:
        source.doubts.append(
            f"{named}: there is no such file here, so its settings are missing; start in the folder of {source.system}"
        )
        return
    try:
        content = _mapping(file.read_text(encoding="utf-8"), str(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as text: {error}") from error
    given = {item.key for item in source.items}
    in_file = _items_of(content, source.is_nested, str(named.value))
    source.items = [*(item for item in in_file if item.key not in given), *source.items]
