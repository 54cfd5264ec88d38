"""`rl-vlm launch`: the commands that start a run on several machines, or one job file for Slurm."""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.serve import joining_words
from rl_vlm.config.load import check_trainable, load_config
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError

FILES = Path(__file__).parent / "accelerate"
ENGINES = ("ddp", "zero2", "zero3", "zero3_offload", "fsdp2")
"""How ranks hold the model: the files of `FILES` for GPUs."""
FIRST_PORT, SERVER_PORT = 29500, 8000
MARGIN = 30
"""Seconds that a launcher, and Slurm, wait for longer than the run's own grace period."""
MOST_RESTARTS = 3
"""Of the processes of one machine, after one of them has died."""


class Shell(str):
    """Part of a command that the shell expands; other words are quoted."""


Words = Sequence[str]


@dataclass(frozen=True)
class Cluster:
    """The machines of a run."""

    hosts: list[str]
    """Names or addresses, in the shell's language: those that train, then those that sample."""
    num_training: int
    gpus: int
    """Of each machine."""
    engine: str
    port: int

    @property
    def num_sampling(self) -> int:
        """Return how many machines have rollout servers."""
        return len(self.hosts) - self.num_training


@dataclass(frozen=True)
class Job:
    """A run as it was given to the command line, and the machines for it."""

    config: RunConfig
    words: list[str]
    """The config's path and overrides."""
    cluster: Cluster

    @property
    def output_dir(self) -> str:
        """Return the run directory."""
        return self.config.train.output_dir

    @property
    def shutdown_seconds(self) -> int:
        """Return the time that launchers give their processes to save."""
        return math.ceil(self.config.train.stop_grace_seconds) + MARGIN

    def trainer_words(self) -> Words:
        """Return the arguments of `launch.train`, which resumes a run that has begun."""
        resumed = ["resume_from_checkpoint=auto"]
        if not self.cluster.num_sampling:
            return [*self.words, *resumed]
        urls = [
            f"http://{host}:{SERVER_PORT + i}"
            for host in self.cluster.hosts[self.cluster.num_training :]
            for i in range(self.num_servers())
        ]
        joins = Shell(f'"vllm_server_base_url=[{",".join(urls)}]"')
        return [*joining_words(self.words, self.config.vllm), joins, *resumed]

    def num_servers(self) -> int:
        """Return the number of servers on a machine."""
        return self.cluster.gpus // self.config.vllm.vllm_tensor_parallel_size

    def server_words(self, folder: str) -> Words:
        """Return the command that starts the servers of one machine, with logs in `folder` of the run directory."""
        size = self.config.vllm.vllm_tensor_parallel_size
        devices = [",".join(map(str, range(i * size, (i + 1) * size))) for i in range(self.num_servers())]
        settings = [f"vllm_num_servers={len(devices)}", f"vllm_server_devices={json.dumps(devices)}"]
        if self.config.rollout.engine != "vllm_server":  # the file has the share of GPUs that also train
            settings.append("vllm_gpu_memory_utilization=0.9")
        place = Shell(f'"train.output_dir={self.output_dir}/{folder}"')
        return ["rl-vlm", "serve", *self.words, *settings, place, "--host", "0.0.0.0", "--port", str(SERVER_PORT)]

    def accelerate_words(self) -> Words:
        """Return the arguments of `accelerate launch` on each machine, but for the machine's own number."""
        cluster = self.cluster
        file = os.path.relpath(FILES / f"{cluster.engine}.yaml")
        options = ["--config_file", file if not file.startswith("..") else str(FILES / f"{cluster.engine}.yaml")]
        options += ["--num_processes", str(cluster.num_training * cluster.gpus)]
        if cluster.num_training > 1:
            options += [
                "--num_machines",
                str(cluster.num_training),
                "--main_process_ip",
                Shell(f'"{cluster.hosts[0]}"'),
            ]
            options += ["--main_process_port", str(cluster.port)]
        else:
            options += ["--max_restarts", str(MOST_RESTARTS)]
        return [*options, "-m", "launch.train", *self.trainer_words()]


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options for the machines."""
    parser.usage = (
        f"{parser.usage} [--nodes N] [--gpus N] [--engine NAME] [--rollout-nodes N] [--hosts A,B,…] [--port PORT] "
        "[--slurm] [--time TIME]"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines that train; default: 1")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs of each machine; default: 8")
    parser.add_argument("--engine", choices=ENGINES, default="ddp", help="how ranks hold the model; default: ddp")
    parser.add_argument(
        "--rollout-nodes",
        type=int,
        default=0,
        metavar="N",
        help="further machines, with vLLM servers on all their GPUs",
    )
    parser.add_argument(
        "--hosts", type=lambda text: text.split(","), metavar="A,B,…",
        help="names or addresses of the machines: those that train, then those with servers; not for --slurm",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=int, default=FIRST_PORT, metavar="PORT",
        help=f"free port of the first machine; default: {FIRST_PORT}",
    )  # fmt: skip
    parser.add_argument("--slurm", action="store_true", help="print one file for sbatch, which queues itself again")
    parser.add_argument(
        "--time", default="24:00:00", metavar="TIME", help="time limit of the Slurm job; default: 1 day"
    )


def launch_command(config: RunConfig, options: argparse.Namespace) -> None:
    """Print the commands that start a run on several machines, or a job file for Slurm."""
    job = planned_job(config, options)
    check(job)
    print(slurm_file(job, options.time) if options.slurm else commands(job), end="")


def planned_job(config: RunConfig, options: argparse.Namespace) -> Job:
    """Return the job that the options describe. Raises ConfigError if a number is out of range."""
    num_hosts = options.nodes + options.rollout_nodes
    if min(options.nodes, options.gpus) < 1 or options.rollout_nodes < 0:
        raise ConfigError("--nodes and --gpus are numbers from 1, and --rollout-nodes is one from 0")
    if options.hosts and options.slurm:
        raise ConfigError("--hosts: Slurm chooses the machines; leave it out")
    if options.hosts and len(options.hosts) != num_hosts:
        raise ConfigError(f"--hosts has {len(options.hosts)} names for {num_hosts} machines; give one for each")
    hosts = options.hosts or [f"node-{i}" for i in range(num_hosts)]
    if options.slurm:
        hosts = [f"${{hosts[{i}]}}" for i in range(num_hosts)]
    cluster = Cluster(hosts, options.nodes, options.gpus, options.engine, options.port)
    return Job(config, [options.config, *options.overrides], cluster)


def check(job: Job) -> None:
    """Raise the error with which the run would end on these machines, as far as settings can tell."""
    from rl_vlm.plan.check import check_setup
    from rl_vlm.plan.engines import ENGINES as BY_NAME

    cluster = replace(job.cluster, hosts=[f"node-{i}" for i in range(len(job.cluster.hosts))])
    size = job.config.vllm.vllm_tensor_parallel_size
    if cluster.num_sampling and size > cluster.gpus:
        raise ConfigError(
            f"`vllm_tensor_parallel_size` {size} is more than the {cluster.gpus} GPUs of a machine with servers"
        )
    words = replace(job, cluster=cluster).trainer_words()
    path, *overrides = shlex.split(shell(words))
    config = load_config(path, overrides)
    check_trainable(config)
    check_setup(config, BY_NAME[cluster.engine], cluster.num_training * cluster.gpus)


def commands(job: Job) -> str:
    """Return the commands of each machine."""
    cluster = job.cluster
    token = f"export RL_VLM_SERVER_TOKEN={secrets.token_urlsafe(32)}\n" if cluster.num_sampling else ""
    before = f"cd {shlex.quote(os.getcwd())}\n{token}export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.shutdown_seconds}\n"
    parts = ["# Every machine needs the same environment, and this directory on a file system that all share.\n"]
    for i, host in enumerate(cluster.hosts[cluster.num_training :]):
        parts.append(f"# On {host}:\n{before}{shell(job.server_words(f'servers-{i}'))}\n")
    for i, host in enumerate(cluster.hosts[: cluster.num_training]):
        number = ["--machine_rank", str(i)] if cluster.num_training > 1 else []
        parts.append(f"# On {host}:\n{before}{shell(['accelerate', 'launch', *number, *job.accelerate_words()])}\n")
    return "\n".join(parts)


def slurm_file(job: Job, time: str) -> str:
    """Return a file for sbatch."""
    cluster, last = job.cluster, job.cluster.num_training
    return SLURM.format(
        name=shlex.quote(Path(job.output_dir).name), nodes=len(cluster.hosts), gpus=cluster.gpus, time=time,
        before=job.shutdown_seconds + MARGIN, shutdown=job.shutdown_seconds, output_dir=shlex.quote(job.output_dir),
        folder=shlex.quote(os.getcwd()), num_training=last, launcher=shell(job.accelerate_words()),
        servers=slurm_servers(job) if cluster.num_sampling else "",
    )  # fmt: skip


def slurm_servers(job: Job) -> str:
    """Return the lines that start rollout servers on the last machines of a Slurm job."""
    first, last = job.cluster.num_training, len(job.cluster.hosts) - 1
    return SERVERS.format(first=first, last=last, command=shell(job.server_words("servers-$i")))


def shell(words: Words) -> str:
    """Return a command for the shell, with a line for each option."""
    text = ""
    for word in words:
        begins = word.startswith("-") and not text.endswith("-m ")
        text += (" \\\n    " if begins and text else " " if text else "") + (
            word if isinstance(word, Shell) else shlex.quote(word)
        )
    return text


SERVERS = """\
export RL_VLM_SERVER_TOKEN=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')
for i in $(seq {first} {last}); do
    srun --nodes=1 --ntasks=1 --nodelist="${{hosts[$i]}}" {command} &
done
"""

SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={gpus}
#SBATCH --time={time}
#SBATCH --requeue --open-mode=append --output=%x-%j.log
#SBATCH --signal=B:USR1@{before}
# Before the time limit the run saves, and the job is queued again. The same happens if the run fails after a new
# checkpoint. The next start resumes the newest complete checkpoint. If a machine fails or is taken back, Slurm itself
# queues the job again.
cd {folder} || exit 1
hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={shutdown}
started=$(mktemp)
stopping= cancelled=

{servers}
srun --nodes={num_training} --ntasks={num_training} \\
    --nodelist="$(IFS=,; echo "${{hosts[*]:0:{num_training}}}")" --kill-on-bad-exit=1 \\
    bash -c 'exec accelerate launch --machine_rank "$SLURM_PROCID" "$@"' launcher \\
    {launcher} &
trainer=$!
trap 'stopping=1; kill -TERM "$trainer"' USR1
trap 'cancelled=1; kill -TERM "$trainer"' TERM

wait "$trainer"; status=$?
while kill -0 "$trainer" 2>/dev/null; do wait "$trainer"; status=$?; done
new=$(find {output_dir} -maxdepth 1 -name 'checkpoint-*' -newer "$started")
rm "$started"
if [ "$status" -ne 0 ] && [ -z "$cancelled" ] && [ -n "$stopping$new" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
