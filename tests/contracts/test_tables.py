"""What is true of an engine or a sharding stands in its row, and nothing else compares with its name.

A made-up engine and a made-up sharding are each added by a file of their own and one row.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from rl_vlm.config.engines import ENGINES
from rl_vlm.config.schema import VLLMConfig
from rl_vlm.distributed.shardings import SHARDINGS, Kind, kinds

ROOT = Path(__file__).parents[2]
TYPES = [name for kind in kinds().values() for name in kind.distributed_types]
TABLES = {"engine": {*ENGINES}, "sharding": {*SHARDINGS, *kinds(), *TYPES}}
"""Names that no code compares with, by the table that has them."""
BUILDERS = [place for row in ENGINES.values() for place in (row.training, row.evaluation)]
OTHER_NAMES = re.compile(r"\bDDP\b|\bZeRO-\d|\bFSDP2\b")
"""Names of shardings in their papers. Errors use the names of the table, which users write."""


def places(kind: Kind) -> tuple[str | None, ...]:
    """The functions that a kind of sharding names."""
    return kind.strategy, kind.launch, kind.sharding, kind.check


STRATEGIES = [place for kind in kinds().values() for place in places(kind) if place]
OWN_FILES = {
    "rl_vlm/config/engines.py",
    "rl_vlm/distributed/shardings.py",
    *(f"{place.partition(':')[0].replace('.', '/')}.py" for place in [*BUILDERS, *STRATEGIES]),
}
"""The tables, and the files that their rows name."""


def constants(node: ast.AST) -> set[str]:
    """Strings that an expression is, or that a literal of several values has."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    parts = [*node.keys, *parts] if isinstance(node, ast.Dict) else parts
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def comparisons(code: str) -> Iterator[tuple[int, str]]:
    """Line and name of each comparison with a name of a table: `==`, `!=`, `in`, `not in`, or a `case`."""
    names = set().union(*TABLES.values())
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Compare(left=left, comparators=others):
                found = set().union(*map(constants, [left, *others])) & names
            case ast.MatchValue(value=value):
                found = constants(value) & names
            case _:
                continue
        yield from ((node.lineno, name) for name in sorted(found))


def copies(code: str) -> Iterator[tuple[int, list[str]]]:
    """Line and names of each literal that lists several names of one table, as `Literal[...]` and `choices` do."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
            for names in TABLES.values():
                if len(found := constants(node) & names) > 1:
                    yield node.lineno, sorted(found)


def other_files() -> Iterator[tuple[str, str]]:
    """Name and code of each file that has no row of its own."""
    for folder in ("rl_vlm", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if (name := str(path.relative_to(ROOT))) not in OWN_FILES:
                yield name, path.read_text()


def test_nothing_compares_with_the_name_of_an_engine_or_a_sharding():
    found = [f"{file}:{line} {name}" for file, code in other_files() for line, name in comparisons(code)]
    assert found == []


def test_nothing_lists_the_names_of_a_table():
    found = [f"{file}:{line} {', '.join(names)}" for file, code in other_files() for line, names in copies(code)]
    assert found == []


def messages(code: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string in an error that is raised."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def test_errors_name_a_sharding_as_its_row_does():
    found = [
        f"{file}:{line}" for file, code in other_files() for line, text in messages(code) if OTHER_NAMES.search(text)
    ]
    assert found == []
    assert [line for line, text in messages('raise E(\n    f"{n} with ZeRO-3")') if OTHER_NAMES.search(text)] == [2]


COMPARES = """
if config.rollout.engine == "hf" or "vllm" != engine:
    pass
if engine in (None, "hf") and kind not in {"deepspeed": 1}:
    pass
match asked["distributed_type"]:
    case "FSDP" | "other":
        pass
is_other = name == "something else"
"""


def test_what_counts_as_a_comparison():
    assert list(comparisons(COMPARES)) == [(2, "hf"), (2, "vllm"), (4, "hf"), (4, "deepspeed"), (7, "FSDP")]
    listed = 'Literal["hf", "vllm"]\nSHOWN = ("vllm", "deepspeed")\nadd("--engine", choices=["ddp", "zero2"])'
    assert list(copies(listed)) == [(1, ["hf", "vllm"]), (3, ["ddp", "zero2"])]


def test_rows_name_functions_that_exist():
    memory = [row.memory for row in ENGINES.values() if row.memory is not None]
    assert all(callable(resolve_name(place)) for place in [*BUILDERS, *STRATEGIES, *memory])


def test_every_setting_of_vllm_is_read_by_an_engine():
    assert set().union(*(row.reads for row in ENGINES.values())) == {*VLLMConfig.model_fields}


def first_column(page: str, head: str) -> list[str]:
    """Code in the first column of the table of a page whose head begins with `head`."""
    table = (ROOT / page).read_text().split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)


def test_pages_have_the_rows_of_the_tables():
    files = {path.stem for path in (ROOT / "launch/accelerate").glob("*.yaml")} & {*SHARDINGS}
    assert first_column("docs/rollouts.md", "engine") == [*ENGINES]
    assert {name.removesuffix(".yaml") for name in first_column("docs/distributed.md", "file")} == files
    option = next(
        line for line in (ROOT / "docs/memory.md").read_text().splitlines() if "| `--sharding NAME` |" in line
    )
    assert set(re.findall(r"`(\w+)`", option)) == {*SHARDINGS}
    guide = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    layout = next(line for line in guide if line.startswith("| `rl_vlm/rollout/`"))
    assert re.findall(r"`(\w+)`", layout) == [*ENGINES]


ECHO_ROW = """\
    "echo": Engine(
        title="Echo",
        training="rl_vlm.rollout.echo:training_engine",
        evaluation="rl_vlm.rollout.echo:evaluation_engine",
        memory="rl_vlm.rollout.echo:rollouts",
        package="echo_samples",
        reads=frozenset({"vllm_max_logp_difference"}),
    ),
"""
ECHO = """
from rl_vlm.plan.memory import Rollouts

def training_engine(config, initial, weights, builder, ranks):
    return f"echo of {initial}"

def evaluation_engine(config, checkpoint, builder, ranks):
    return f"echo of {checkpoint}"

def rollouts(config, hardware, model):
    return Rollouts({"echo": 7 * 2**30}, 2**30)
"""
HALVES_ROW = """\
        Sharding(
            name="halves",
            kind=Kind(
                "halves",
                "rl_vlm.distributed.halves:Halves",
                distributed_types=("HALVES",),
                variable="ACCELERATE_USE_HALVES",
            ),
            shards_weights=True,
            sums_in_update=True,
        ),
"""
HALVES = """
from rl_vlm.distributed.ddp import DDP

class Halves(DDP):
    def __init__(self, ranks, config):
        super().__init__(ranks, config.train.max_grad_norm)
        self.equal_calls = ranks.launch.sharding.shards_weights
"""


def insert(file: Path, table: str, end: str, row: str) -> None:
    """Write a row before the end of the table that a file assigns to a name."""
    text = file.read_text()
    (code,) = (
        found
        for node in ast.parse(text).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table
        if (found := ast.get_source_segment(text, node))
    )
    file.write_text(text.replace(code, code.removesuffix(end) + row + end))


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code with another engine and another sharding, each a file of its own and one row."""
    folder = tmp_path_factory.mktemp("extended")
    for name in ("rl_vlm", "launch", "rewards"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "rl_vlm/rollout/echo.py").write_text(ECHO)
    insert(folder / "rl_vlm/config/engines.py", "ENGINES", "}", ECHO_ROW)
    (folder / "rl_vlm/distributed/halves.py").write_text(HALVES)
    insert(folder / "rl_vlm/distributed/shardings.py", "SHARDINGS", "    )\n}", HALVES_ROW)
    (folder / "launch/accelerate/halves.yaml").write_text("distributed_type: HALVES\nnum_processes: 8\n")
    (folder / "run.yaml").write_text(RUN)
    return folder


RUN = """
model: {model_name_or_path: m}
data: {dataset_name: rows.jsonl}
rewards: {reward_funcs: [exact_match]}
train: {prompts_per_step: 8}
"""
COMMON = """
import contextlib, io, json, os
import rl_vlm
assert rl_vlm.__file__.startswith(os.getcwd())
from launch import cli
from rl_vlm.config.load import load_config
from rl_vlm.errors import RLVLMError
from tests.helpers.planned_model import hardware, planned_model, run_config

def printed(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.main(words)
        except SystemExit:
            pass
    return out.getvalue()

def refusal(call, *arguments):
    try:
        call(*arguments)
    except RLVLMError as error:
        return str(error)
"""


def found_by(extended: Path, program: str) -> dict[str, Any]:
    """What a program, which prints JSON, finds in the copy."""
    environment = os.environ | {"PYTHONPATH": f"{extended}{os.pathsep}{ROOT}", "COLUMNS": "120"}
    command = [sys.executable, "-c", COMMON + program]
    result = subprocess.run(command, cwd=extended, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


WITH_ECHO = """
from types import SimpleNamespace
from rl_vlm.plan.build import plan_memory
from rl_vlm.rollout.build import evaluation_engine, training_engine

def problem(*settings):
    return refusal(load_config, "run.yaml", settings)

run = run_config(rollout={"engine": "echo"})
plan = plan_memory(run, hardware(40), planned_model(run))
print(json.dumps({
    "unknown": problem("engine=ech"),
    "unread": problem("engine=echo", "vllm_enforce_eager=true"),
    "stale": problem("engine=echo", "max_staleness=1"),
    "4 bits": problem("engine=echo", "load_in_4bit=true", "use_peft=true"),
    "gathering": problem("engine=echo", "ds3_gather_for_generation=false"),
    "accepted": problem("engine=echo", "weight_sync_steps=2", "vllm_max_logp_difference=0.2"),
    "off-policy": run.rollout.is_off_policy,
    "dry run": printed("train", "run.yaml", "engine=echo", "--dry-run"),
    "chat": printed("chat", "--help"),
    "phases": {phase.name: phase.parts.get("echo", 0) // 2**30 for phase in plan.phases},
    "training": training_engine(run, "initial", None, None, None),
    "evaluation": evaluation_engine(run, "checkpoint", SimpleNamespace(), None),
}))
"""


@pytest.mark.ci
def test_an_engine_is_added_by_its_file_and_one_row(extended: Path):
    found = found_by(extended, WITH_ECHO)
    assert found["unknown"].endswith("it should be 'hf', 'vllm', 'vllm_server' or 'echo'")
    assert found["unread"].endswith(
        "`vllm_enforce_eager`: no effect on `engine` echo; leave them out, or set `engine` to vllm or vllm_server"
    )
    assert found["stale"].endswith(
        "`max_staleness` needs `engine` vllm_server: echo shares its device with the trainer"
    )
    assert "`engine` echo: Echo has no 4-bit weights of bitsandbytes" in found["4 bits"]
    assert "no effect on an engine" in found["gathering"]
    assert (found["accepted"], found["off-policy"]) == (None, True)
    assert "rollout.engine is echo, and Echo is not installed; install it, or use hf" in found["dry run"]
    assert "--engine {hf,vllm,echo}" in found["chat"]
    assert {name for name, size in found["phases"].items() if size == 7} == {"generation", "weight_sync"}
    assert (found["training"], found["evaluation"]) == ("echo of initial", "echo of checkpoint")


WITH_HALVES = """
from pathlib import Path
from launch.plan import accelerate_file
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.shardings import SHARDINGS
from rl_vlm.distributed.launch_variables import check_evaluation_launch
from rl_vlm.distributed.setup import setup_problems
from rl_vlm.distributed.strategy import select_strategy
from rl_vlm.plan.build import plan_memory
from rl_vlm.plan.text import plan_data
from rl_vlm.plan.suggest import with_shardings

class Models:
    of = staticmethod(planned_model)

run = run_config()
machines = hardware(40, gpus=2, sharding="halves")
plan = plan_memory(run, machines, planned_model(run))
os.environ["ACCELERATE_USE_HALVES"] = "true"
ranks = Ranks()
eight_bit = load_config("run.yaml", ["optim=adamw_8bit"])
print(json.dumps({
    "plan help": printed("plan", "--help"),
    "file": accelerate_file(Path("launch/accelerate/halves.yaml"))["sharding"].name,
    "launch": printed("launch", "run.yaml", "--sharding", "halves"),
    "data": plan_data(run, machines, planned_model(run), plan)["sharding"],
    "weights": {name: parts["weights"] // 2**20 for name, parts in
                {"halves": plan.phases[0].parts, "ddp": plan_memory(run, hardware(40, gpus=2), planned_model(run))
                 .phases[0].parts}.items()},
    "suggested": [each.hardware.sharding.name for each in with_shardings(run, {}, machines, Models)],
    "taken": [ranks.launch.kind, ranks.launch.sharding.name, "ACCELERATE_USE_HALVES" in os.environ],
    "strategy": [type(select_strategy(ranks, run)).__name__, select_strategy(ranks, run).equal_calls],
    "at the start": refusal(select_strategy, ranks, eight_bit),
    "in the plan": refusal(setup_problems(eight_bit, SHARDINGS["halves"], 8).refuse),
    "evaluation": refusal(check_evaluation_launch, ranks.launch, "float32"),
}))
"""


@pytest.mark.ci
def test_a_sharding_is_added_by_its_files_and_one_row(extended: Path):
    found = found_by(extended, WITH_HALVES)
    assert "zero3_offload,fsdp2,halves}" in re.sub(r"\s", "", found["plan help"])
    assert (found["file"], found["data"]) == ("halves", "halves")
    assert "--config_file launch/accelerate/halves.yaml" in found["launch"]
    assert found["weights"] == {"halves": 512, "ddp": 1024}
    assert found["suggested"] == [*SHARDINGS, "halves"]
    assert found["taken"] == ["halves", "halves", False]
    assert found["strategy"] == ["Halves", True]
    for refusal in (found["at the start"], found["in the plan"]):
        assert refusal.startswith("train.optim: adamw_8bit cannot be used with halves: its moments are quantized")
    assert "an evaluation does not shard the model" in found["evaluation"]
