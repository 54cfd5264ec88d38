"""The commands and the Slurm job that `rl-vlm launch` prints: settings load, and bash runs them with stand-ins."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch import cli, nodes
from rl_vlm.config import yaml_text
from rl_vlm.config.load import load_config

STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then printf "%s\\n" alpha beta gamma; else echo "$*" >> "$SEEN/scontrol"; fi',
    "srun": 'while [ "$1" != bash ] && [ "$1" != rl-vlm ]; do shift; done; export SLURM_PROCID=1; exec "$@"',
    "rl-vlm": 'printf "%s\\0" "$@" >> "$SEEN/serve"; echo "$RL_VLM_SERVER_TOKEN" >> "$SEEN/tokens"',
    "accelerate": 'printf "%s\\0" "$@" > "$SEEN/accelerate"; echo "$RL_VLM_SERVER_TOKEN" >> "$SEEN/tokens"; '
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
    text = printed(
        capsys, config, "seed=3", "--nodes", "2", "--gpus=4", "--sharding=zero3", "--hosts=10.0.0.1,10.0.0.2"
    )
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
        (["--nodes=3", "--gpus=7"], "`prompts_per_step` 32 "),
        (["--nodes=0"], "--nodes and --gpus must be at least 1"),
        (["--nodes=2", "--hosts=a,b,c"], "--hosts has 3 names for 2 machines"),
        (["--hosts=a", "--slurm"], "--hosts: Slurm chooses the machines"),
        (["--hosts="], "--hosts: '' is no name or IPv4 address of a machine"),
        (["--nodes=2", "--hosts=a,"], "--hosts: '' is no name"),
        (["--hosts=$(id)"], "--hosts: '$(id)' is no name"),
        (["--hosts=a\nid"], "--hosts: 'a\\nid' is no name"),
        (["--hosts=300.1.1.1"], "--hosts: '300.1.1.1' is no name"),
        (["--hosts=0.0.0.0"], "--hosts: '0.0.0.0' is no name"),
        (["--hosts=::1"], "--hosts: '::1' is no name or IPv4 address"),
        (["--hosts=" + "x" * 64], "is no name"),
        (["--hosts=" + "x." * 127], "is no name"),
        (["--nodes=2", "--hosts=a,a"], "--hosts names a twice"),
        (["--nodes=2", "--hosts=localhost,b"], "--hosts: localhost names a different machine on each of them"),
        (["--nodes=2", "--hosts=a,127.0.1.1"], "--hosts: 127.0.1.1 names a different machine on each of them"),
        (["--time=1:00:00"], "--time is the limit of a Slurm job: add --slurm"),
        (["--slurm", "--time="], "--time '' is no time limit of Slurm"),
        (["--slurm", "--time=1:2:3:4"], "--time '1:2:3:4' is no time limit"),
        (["--slurm", "--time=-5"], "--time '-5' is no time limit"),
        (["--slurm", "--time=12:00:00\ntouch x"], "is no time limit of Slurm"),
        (["--slurm", "--time=0"], "--time 0 is 0 s, but Slurm signals the run to save 660 s before the end"),
        (["--slurm", "--time=11"], "--time 11 is 660 s"),
        (["--slurm", "--time=10:59"], "--time 10:59 is 659 s"),
        (["--slurm", "stop_grace_seconds=65480"], "asks for a signal 65540 s before the time limit"),
        (["--gpus=60000", "--rollout-nodes=1", "prompts_per_step=60000", "vllm_tensor_parallel_size=1"], "ports"),
        (["--gpus=1", "--rollout-nodes=1"], "`vllm_tensor_parallel_size` 2 is more than the 1 GPUs"),
        (["--sharding=zero3", "optim=adamw_8bit"], "adamw_8bit"),
    ],
)
def test_what_the_run_would_refuse_is_not_printed(config, options, message, capsys):
    assert cli.main(["launch", config, *options]) == 2
    found = capsys.readouterr()
    assert message in found.err and not found.out


@pytest.mark.parametrize("port", ["0", "65536", "-1", "1e3", "²", "9" * 5000])
def test_there_are_no_such_ports(config, port, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["launch", config, f"--port={port}"])
    assert "argument --port: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "time", ["12", "11:01", "00:11:01", "24:00:00", "0-1", "1-0", "0-0:12", "0-0:11:01", "100-00:00:00"]
)
def test_times_of_slurm(config, time, capsys):
    assert f"\n#SBATCH --time={time}\n" in printed(capsys, config, "--slurm", f"--time={time}")


def stand_ins(folder: Path) -> tuple[Path, dict[str, str]]:
    """Write the programs of `STAND_INS`. Returns the folder of what they saw, and the environment that has them."""
    programs, seen = folder / "bin", folder / "seen"
    for made in (programs, seen):
        made.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "SEEN": str(seen), "DO": "exit 0", "SLURM_JOB_ID": "7"}
    return seen, os.environ | variables | {"SLURM_JOB_NODELIST": "x"}


HOSTILE = "a$(touch HIT)`touch HIT`;touch HIT;'touch HIT'\"touch HIT\"&& touch HIT #\ntouch HIT\n{x} %s ~ * ! \\"


@pytest.mark.parametrize(
    "options",
    [["--nodes=2", "--hosts=alpha,beta"], ["--rollout-nodes=1"], ["--slurm"], ["--slurm", "--rollout-nodes=1"]],
    ids=["machines", "servers", "slurm", "slurm_servers"],
)
def test_nothing_that_is_printed_runs_what_a_setting_holds(options, config, tmp_path, capsys, monkeypatch):
    place = tmp_path / HOSTILE
    place.mkdir()
    monkeypatch.chdir(place)
    path = place / f"{HOSTILE}.yaml"
    # `find` would take `-delete` as an order. A run refuses `$` and `~` in this setting.
    output_dir = f"-delete/{HOSTILE.replace('$', '').replace('~', '')}"
    settings = yaml_text.parse(Path(config).read_text()) | {"output_dir": output_dir}
    path.write_text(yaml_text.dump(settings))
    name = f"data.dataset_name={yaml_text.one_line(HOSTILE)}"
    text = printed(capsys, path.name, name, *options)

    seen, variables = stand_ins(tmp_path)
    file = tmp_path / "printed.sh"
    file.write_text(text)
    hostile = {"SLURM_JOB_ID": HOSTILE, "SLURM_JOB_NODELIST": HOSTILE}
    assert subprocess.run(["bash", str(file)], env=variables | hostile, cwd=tmp_path, timeout=60).returncode == 0

    assert not list(tmp_path.rglob("HIT*")) and path.exists()
    trainer = words_of(seen / "accelerate")
    assert trainer[trainer.index("launch.train") + 1 :][:2] == [path.name, name]
    if "--rollout-nodes=1" in options:
        served = words_of(seen / "serve")
        found = load_config(served[1], served[2 : served.index("--host")], {"rollout.engine": "vllm_server",
                            "vllm.vllm_enable_sleep_mode": False})  # fmt: skip
        number = "1" if "--slurm" in options else "0"
        assert (found.train.output_dir, found.data.dataset_name) == (f"{output_dir}/servers-{number}", HOSTILE)
    if "--slurm" in options:
        orders = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        assert text.splitlines()[1:6] == orders
        assert re.fullmatch(r"#SBATCH --job-name=[A-Za-z0-9._-]+", orders[0])


def test_a_word_in_parts_is_one_word(tmp_path):
    line = nodes.shell(
        ["printf", "%s\\0", (f"{HOSTILE}$i", nodes.Shell("$i"), nodes.Shell("${a[1]}"), "$i"), "", "-m", "-x"]
    )
    ran = subprocess.run(["bash", "-c", f"i='4 5'; a=(0 '* x'); {line}"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.split("\0") == [f"{HOSTILE}$i4 5* x$i", "", "-m", "-x", ""]
    assert not list(tmp_path.iterdir())


def words_of(path: Path) -> list[str]:
    """Return the words with which a stand-in was called."""
    return path.read_text().split("\0")[:-1]


@pytest.fixture
def job(config, tmp_path, capsys):
    """A Slurm job of two training machines and one with servers, which runs with stand-ins for Slurm's programs."""
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    seen, environment = stand_ins(tmp_path)
    file = tmp_path / "job.sh"
    file.write_text(printed(capsys, config, "--nodes=2", "--gpus=4", "--rollout-nodes=1", "--slurm"))

    def start(do: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", str(file)], env=environment | {"DO": do})

    return start, seen, run


def test_a_slurm_job_starts_servers_and_trainer_on_its_machines(job):
    start, seen, _ = job
    assert start("exit 0").wait(30) == 0
    accelerate = words_of(seen / "accelerate")
    assert accelerate[:3] == ["launch", "--machine_rank", "1"]
    assert accelerate[accelerate.index("--main_process_ip") + 1] == "alpha"
    assert "vllm_server_base_url=[http://gamma:8000,http://gamma:8001]" in accelerate
    assert words_of(seen / "serve")[0] == "serve"
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
