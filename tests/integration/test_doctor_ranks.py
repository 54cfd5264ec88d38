"""`rl-vlm doctor --ranks` under the launcher, on two machines that are two directories."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_vlm.config.describe import to_yaml
from rl_vlm.passes.proof import AGAIN, OWN_FORWARD
from rl_vlm.rollout.vllm.process import LOOPBACK, free_port
from rl_vlm.tools.checks import ranks
from rl_vlm.tools.checks.diagnosis import Note
from rl_vlm.tools.checks.rank_steps import (
    has_model,
    settings_on_ranks,
    steps_on_ranks,
    two_steps_on_ranks,
    why_not_taken,
)
from rl_vlm.tools.checks.sharding import sharding
from rl_vlm.tools.checks.table import CheckCost, Subject
from tests.helpers.builders import noise_image
from tests.helpers.tiny_run import HELD_OUT_ROWS, make_config
from tests.helpers.two_processes import CPU, REPOSITORY


def write_machine(folder: Path, model: Path) -> None:
    """Write what a run needs into a directory that stands for a machine; all paths are relative."""
    folder.mkdir()
    shutil.copytree(model, folder / "model")
    noise_image(16, 16, seed=0).save(folder / "digit.png")
    rows = [{"prompt": f"Which digit, {i}?", "image": "digit.png", "solution": "7"} for i in range(7)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "mine.py").write_text("def score(completions, **_):\n    return [0.0 for _ in completions]\n")
    config = make_config("model", Path("run"), dataset_name="rows.jsonl", reward_funcs=["mine.py:score"])
    (folder / "run.yaml").write_text(to_yaml(config))


def examine(*folders: Path) -> tuple[list[int], dict]:
    """Start the doctor on each machine. Return the exit statuses and what rank 0 has found."""
    port = str(free_port(LOOPBACK))
    found = folders[0] / "found.json"
    processes = []
    for number, folder in enumerate(folders):
        command = [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(REPOSITORY / CPU),
            "--num_processes", "2", "--num_machines", "2", "--machine_rank", str(number),
            "--main_process_ip", LOOPBACK, "--main_process_port", port,
            "-m", "launch.preflight", "run.yaml", "--json", str(found),
        ]  # fmt: skip
        path = os.pathsep.join([str(folder / "packages"), str(REPOSITORY)])
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        processes.append(subprocess.Popen(command, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True))
    logs = [process.communicate(timeout=600)[1] for process in processes]
    assert found.exists(), logs
    return [process.returncode for process in processes], json.loads(found.read_text())


def test_machines_that_are_the_same_have_no_finding(tiny_checkpoint, tmp_path):
    write_machine(tmp_path / "a", tiny_checkpoint)
    statuses, found = examine(tmp_path / "a", tmp_path / "a")
    assert statuses == [0, 0] and found["findings"] == []
    assert found["checked"][0].startswith("2 ranks: ") and found["not_checked"] == []
    proof = [line for line in found["checked"] if line.startswith("before the first step: ")]
    assert proof[0].startswith(f"before the first step: {AGAIN} differ in log-probs")
    assert any(line.startswith(f"before the first step: {OWN_FORWARD} differ") for line in proof)
    assert found["checked"][-1] == "two steps of the run on 2 ranks, and a checkpoint"
    assert not list((tmp_path / "a").glob(".rl-vlm-doctor*"))


@pytest.mark.slow
def test_an_error_that_would_end_the_run_on_all_ranks_is_named(tiny_checkpoint, tmp_path):
    write_machine(tmp_path / "a", tiny_checkpoint)
    config = tmp_path / "a" / "run.yaml"
    config.write_text(config.read_text().replace("max_prompt_length: null", "max_prompt_length: 1"))
    statuses, found = examine(tmp_path / "a", tmp_path / "a")
    assert statuses == [1, 1] and found["status"] == 2
    (finding,) = found["findings"]
    assert finding["kind"] == "two steps of the run on all ranks" and "max_prompt_length" in finding["what"]
    assert not list((tmp_path / "a").glob(".rl-vlm-doctor*"))


def test_everything_in_which_a_machine_differs_is_named(tiny_checkpoint, tmp_path):
    for name in "ab":
        write_machine(tmp_path / name, tiny_checkpoint)
    other = tmp_path / "b"
    (other / "run.yaml").write_text((other / "run.yaml").read_text().replace("max_steps: 4", "max_steps: 5"))
    (other / "rows.jsonl").write_text((other / "rows.jsonl").read_text().replace("7", "8", 1))
    (other / "mine.py").write_text((other / "mine.py").read_text().replace("0.0", "1.0"))
    (other / "model" / "model.safetensors").unlink()
    metadata = other / "packages" / "peft-0.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.1.0\n")
    statuses, found = examine(tmp_path / "a", other)
    assert statuses == [1, 1] and found["status"] == 2  # the launcher's, and the command's
    what = [finding["what"].partition("): ")[2] for finding in found["findings"]]
    assert what[0] == "train.max_steps: 5 instead of 4"
    assert what[1].startswith("peft: 0.1.0 instead of ")
    assert [text.partition(":")[0] for text in what[2:6]] == [
        "mine.py",
        "model",
        "model/model.safetensors",
        "rows.jsonl",
    ]
    assert "missing instead of" in what[4]
    assert what[6:] == ["it does not see the files that rank 0 writes to train.output_dir"]
    assert all(finding["what"].startswith("rank 1 (") for finding in found["findings"])
    assert found["not_checked"] == ["two steps of the run on all ranks: the ranks differ"]


class LoneExchange(ranks.Exchange):
    """Three ranks, of which the others have answered already."""

    def __init__(self, messages: dict[str, object]) -> None:
        self.rank, self.world_size, self.messages = 0, 3, messages

    def put(self, key: str, value: object) -> None:
        self.messages[key] = value

    def take(self, key: str) -> object:
        return self.messages[key]


def test_steps_need_the_model_on_every_machine(tiny_checkpoint, tmp_path):
    config = make_config(tiny_checkpoint, tmp_path / "run")
    exchange = LoneExchange({"model/1": False, "model/2": True})
    (note,) = two_steps_on_ranks(config, exchange)
    assert note == Note(
        "two steps of the run on all ranks: the model is not on the machine of rank 1; download it first", False
    )
    assert exchange.messages["model/0"] is True
    assert why_not_taken(config, LoneExchange({"model/1": True, "model/2": True})) is None
    assert not has_model("owner/not_there", "main")


@pytest.mark.parametrize(
    ("differ", "accepted", "cost", "reason"),
    [
        (True, True, CheckCost.MODEL, "the ranks differ"),
        (False, False, CheckCost.MODEL, "the settings have errors"),
        (False, True, CheckCost.ROWS, "--no-model is set"),
    ],
)
def test_steps_need_ranks_and_settings_without_errors(differ, accepted, cost, reason, tmp_path):
    subject = Subject(make_config("model", tmp_path), "ranks", cost)
    subject.values |= {ranks.compared: ranks.Compared(LoneExchange({}), differ), sharding: accepted}
    assert list(steps_on_ranks(subject)) == [Note(f"two steps of the run on all ranks: {reason}", False)]


def test_another_launch_of_a_rank_is_a_difference(tmp_path, monkeypatch):
    config = make_config("model", tmp_path)
    own = ranks.facts_of(config)["settings"]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    other = ranks.facts_of(config)["settings"]
    assert list(ranks.unequal(json.loads(json.dumps(other)), own)) == [("launcher's kind", "fsdp2 instead of ddp")]


def test_steps_on_ranks_have_rows_for_each_and_no_evaluation(tmp_path):
    evaluated = {
        "eval_dataset_name": HELD_OUT_ROWS,
        "eval_steps": 2,
        "num_generations_eval": 3,
        "eval_temperature": 0.5,
    }
    config = make_config("model", tmp_path, **evaluated, max_prompt_length=90)
    found = settings_on_ranks(config, tmp_path / "folder", num_ranks=4)
    assert (found.train.prompts_per_step, found.train.max_steps, found.model.verify) == (8, 2, "full")
    assert found.train.output_dir == str(tmp_path / "folder") and found.data.eval_dataset_name is None
    assert found.data.dataset_name == config.data.dataset_name and found.data.max_prompt_length == 90


class FakeExchange(ranks.Exchange):
    """A rank whose messages are answered by rank 0, whose clock is 5 s behind, after a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.world_size, self.now = 1, 2, 100.0
        monkeypatch.setattr("time.time", lambda: self.now)

    def put(self, key: str, value: object) -> None:
        self.now += 0.5

    def take(self, key: str) -> float:
        there = self.now - 5.0
        self.now += 0.5
        return there


def test_the_clock_is_compared_with_the_middle_of_question_and_answer(monkeypatch):
    exchange = FakeExchange(monkeypatch)
    assert ranks.clock_offset(exchange) == (5.0, 0.5)


def report(**changes: object) -> dict:
    facts = {kind: {} for kind in ranks.KINDS}
    plain = {"who": "node-b, process 7", "facts": facts, "servers": [], "unreachable": None, "sees_output_dir": True}
    return plain | {"offset": [0.0, 0.1]} | changes


@pytest.mark.parametrize(("offset", "named"), [((1.4, 0.5), False), ((-1.6, 0.5), True), ((0.9, 0.0), False)])
def test_a_clock_is_named_if_it_differs_beyond_doubt(offset, named):
    found = list(ranks.differences(1, report(offset=offset), report()))
    assert [finding.kind for finding in found] == ["clock"] * named


def test_servers_and_ranks_that_cannot_be_reached_are_named():
    broken = report(servers=["the server x cannot be reached"], unreachable="rank 0 not")
    found = list(ranks.differences(3, broken, report()))
    assert [(finding.severity, finding.kind) for finding in found] == [("error", "network"), ("error", "server")]
    assert all(finding.what.startswith("rank 3 (node-b, process 7): ") for finding in found)
