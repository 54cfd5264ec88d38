"""The commands and the Slurm job that `rl-vlm launch` prints: settings load, and bash runs them with stand-ins."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch import cli
from rl_vlm.config.load import load_config

STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then printf "%s\\n" alpha beta gamma; else echo "$*" >> "$SEEN/scontrol"; fi',
    "srun": 'while [ "$1" != bash ] && [ "$1" != rl-vlm ]; do shift; done; export SLURM_PROCID=1; exec "$@"',
    "rl-vlm": 'printf "%s\\n" "$@" >> "$SEEN/serve"; echo "$RL_VLM_SERVER_TOKEN" >> "$SEEN/tokens"',
    "accelerate": 'printf "%s\\n" "$@" > "$SEEN/accelerate"; echo "$RL_VLM_SERVER_TOKEN" >> "$SEEN/tokens"; '
                  'trap "touch $SEEN/saved; exit 1" TERM; eval "$DO"',
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "my run.yaml"
    path.write_text(
        f"model_name_or_path: m\ndataset_name: d.json\nreward_funcs: [exact_match]\noutput_dir: {tmp_path}/runs/a\n"
        "prompts_per_step: 32\nengine: vllm\nvllm_enable_sleep_mode: true\nvllm_tensor_parallel_size: 2\n"
    )
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["launch", *arguments]) == 0
    return capsys.readouterr().out


def launched(text: str) -> list[list[str]]:
    """Return the words of each command that is no assignment."""
    lines = text.replace("\\\n", "").splitlines()
    return [shlex.split(line) for line in lines if line.startswith(("accelerate", "rl-vlm"))]


def test_each_machine_gets_its_command(config, capsys):
    text = printed(capsys, config, "seed=3", "--nodes", "2", "--gpus=4", "--engine=zero3", "--hosts=10.0.0.1,10.0.0.2")
    first, second = launched(text)
    words = (
        "accelerate launch --machine_rank 0 --config_file launch/accelerate/zero3.yaml --num_processes 8 "
        "--num_machines 2 --main_process_ip 10.0.0.1 --main_process_port 29500 -m launch.train"
    )
    assert first == [*words.split(), config, "seed=3", "resume_from_checkpoint=auto"]
    assert second == [*first[:3], "1", *first[4:]]
    assert text.count("export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=630\n") == 2
    assert f"cd {shlex.quote(os.getcwd())}\n" in text


def test_processes_of_one_machine_are_started_again(config, capsys):
    (words,) = launched(printed(capsys, config, "--gpus", "4"))
    assert words[2:8] == "--config_file launch/accelerate/ddp.yaml --num_processes 4 --max_restarts 3".split()


def test_servers_have_machines_of_their_own_and_the_trainer_joins_them(config, capsys):
    text = printed(capsys, config, "--nodes=2", "--gpus=5", "--rollout-nodes=1", "prompts_per_step=40")
    serve, trainer, _ = launched(text)
    served = load_config(serve[2], serve[3 : serve.index("--host")], {"rollout.engine": "vllm_server"} | {
        "vllm.vllm_enable_sleep_mode": False})  # fmt: skip
    assert served.vllm.vllm_server_devices == ["0,1", "2,3"]
    assert (served.vllm.vllm_num_servers, served.vllm.vllm_gpu_memory_utilization) == (2, 0.9)
    assert serve[serve.index("--host") :] == "--host 0.0.0.0 --port 8000".split()
    path, *overrides = trainer[trainer.index("launch.train") + 1 :]
    joined = load_config(path, overrides)
    assert joined.vllm.vllm_server_base_url == ["http://node-2:8000", "http://node-2:8001"]
    assert (joined.rollout.engine, joined.train.resume_from_checkpoint) == ("vllm_server", "auto")
    assert len(set(re.findall("RL_VLM_SERVER_TOKEN=(.*)", text))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes=3", "--gpus=7"], "`prompts_per_step` 32 cannot be shared equally among 21 processes"),
        (["--nodes=0"], "--nodes and --gpus are numbers from 1"),
        (["--nodes=2", "--hosts=a,b,c"], "--hosts has 3 names for 2 machines"),
        (["--hosts=a", "--slurm"], "--hosts: Slurm chooses the machines"),
        (["--gpus=1", "--rollout-nodes=1"], "`vllm_tensor_parallel_size` 2 is more than the 1 GPUs"),
        (["--engine=zero3", "optim=adamw_8bit"], "adamw_8bit"),
    ],
)
def test_what_the_run_would_refuse_is_not_printed(config, options, message, capsys):
    assert cli.main(["launch", config, *options]) == 2
    found = capsys.readouterr()
    assert message in found.err and not found.out


@pytest.fixture
def job(config, tmp_path, capsys):
    """A Slurm job of two training machines and one with servers, which runs with stand-ins for Slurm's programs."""
    programs, seen, run = tmp_path / "bin", tmp_path / "seen", tmp_path / "runs" / "a"
    for folder in (programs, seen, run):
        folder.mkdir(parents=True)
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    file = tmp_path / "job.sh"
    file.write_text(printed(capsys, config, "--nodes=2", "--gpus=4", "--rollout-nodes=1", "--slurm"))

    def start(do: str) -> subprocess.Popen[bytes]:
        path = f"{programs}:{os.environ['PATH']}"
        variables = os.environ | {
            "PATH": path,
            "SEEN": str(seen),
            "DO": do,
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "x",
        }
        return subprocess.Popen(["bash", str(file)], env=variables)

    return start, seen, run


def test_a_slurm_job_starts_servers_and_trainer_on_its_machines(job):
    start, seen, _ = job
    assert start("exit 0").wait(30) == 0
    accelerate = (seen / "accelerate").read_text().splitlines()
    assert accelerate[:3] == ["launch", "--machine_rank", "1"]
    assert accelerate[accelerate.index("--main_process_ip") + 1] == "alpha"
    assert "vllm_server_base_url=[http://gamma:8000,http://gamma:8001]" in accelerate
    assert (seen / "serve").read_text().splitlines()[0] == "serve"
    assert len(set((seen / "tokens").read_text().split())) == 1
    assert not (seen / "scontrol").exists()


@pytest.mark.parametrize(("do", "requeued"), [("exit 1", False), ("mkdir {run}/checkpoint-3; exit 1", True)])
def test_a_slurm_job_that_fails_is_queued_again_if_it_got_on(job, do, requeued):
    start, seen, run = job
    (run / "checkpoint-2").mkdir()
    os.utime(run / "checkpoint-2", (0, 0))
    assert start(do.format(run=run)).wait(30) == 1
    assert (seen / "scontrol").exists() == requeued
    if requeued:
        assert (seen / "scontrol").read_text() == "requeue 7\n"


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_slurm_job_saves_before_its_time_limit_and_is_queued_again(job, number, requeued):
    start, seen, _ = job
    process = start("while true; do sleep 0.1; done")
    end = time.monotonic() + 30
    while not (seen / "accelerate").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    assert process.wait(30) == 1
    assert (seen / "saved").exists()
    assert (seen / "scontrol").exists() == requeued
