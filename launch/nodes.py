"""`rl-vlm launch`: print the commands that start a run on several machines, or one job file for Slurm."""

from __future__ import annotations

import argparse
import ipaddress
import json
import math
import os
import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from launch.help import LAST_PORT, LOCAL_HOSTS, add_sharding, port
from launch.serve import joining_words
from rl_vlm.config import yaml_text
from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.load import check_trainable, load_config
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.setup import setup_problems
from rl_vlm.distributed.shardings import SHARDINGS, listed_names
from rl_vlm.errors import ConfigError

FILES = Path(__file__).parent / "accelerate"
FIRST_PORT, SERVER_PORT = 29500, 8000
DAY = "24:00:00"
MARGIN = 30
"""Extra seconds that the launcher waits after the run's grace period, and Slurm after the launcher."""
MOST_RESTARTS = 3
"""Maximum number of restarts of a machine's processes, each after one of them has died."""
LONGEST_WARNING = 65535
"""Slurm can send a signal at most this many seconds before the time limit."""
HOST_NAME = re.compile(r"(?!.{254})[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_-]{1,63})*", re.ASCII)
SLURM_TIME = re.compile(
    r"(?P<days>\d{1,6})-(?P<hours>\d{1,6})(:(?P<minutes>\d{1,6})(:(?P<seconds>\d{1,6}))?)?"
    r"|((?P<h>\d{1,6}):)?(?P<m>\d{1,6}):(?P<s>\d{1,6})|(?P<alone>\d{1,6})",
    re.ASCII,
)


class Shell(str):
    """Part of a word that the shell expands, such as `$i`. All other parts are quoted."""


Argument = str | tuple[str, ...]
"""A word of a command, whole or in parts."""
Words = Sequence[Argument]


@dataclass(frozen=True)
class Cluster:
    """The machines of a run."""

    hosts: list[str]
    """Names or addresses, or expressions of class `Shell` in a Slurm job. Machines that train come first."""
    num_training: int
    gpus: int
    """GPUs of each machine."""
    sharding: str
    port: int

    @property
    def num_sampling(self) -> int:
        """Return the number of machines with rollout servers."""
        return len(self.hosts) - self.num_training


@dataclass(frozen=True)
class Job:
    """A run as given on the command line, and its machines."""

    config: RunConfig
    words: list[str]
    """The config's path and overrides."""
    cluster: Cluster
    time: str = DAY
    """Time limit of a Slurm job."""

    @property
    def output_dir(self) -> str:
        """Return the run directory."""
        return self.config.train.output_dir

    @property
    def shutdown_seconds(self) -> int:
        """Return the seconds that launchers give their processes to save."""
        return math.ceil(self.config.train.stop_grace_seconds) + MARGIN

    @property
    def warning_seconds(self) -> int:
        """Return the seconds between the signal to save and the time limit of a Slurm job."""
        return self.shutdown_seconds + MARGIN

    def trainer_words(self) -> Words:
        """Return the arguments of `launch.train`, which resumes a run that has begun."""
        resumed = ["resume_from_checkpoint=auto"]
        if not self.cluster.num_sampling:
            return [*self.words, *resumed]
        urls = [
            part
            for host in self.cluster.hosts[self.cluster.num_training :]
            for i in range(self.num_servers())
            for part in (",http://", host, f":{SERVER_PORT + i}")
        ]
        joins = ("vllm_server_base_url=[", urls[0].removeprefix(","), *urls[1:], "]")
        return [*joining_words(self.words, self.config.vllm), joins, *resumed]

    def num_servers(self) -> int:
        """Return the number of servers on a machine."""
        return self.cluster.gpus // self.config.vllm.vllm_tensor_parallel_size

    def server_words(self, number: str) -> Words:
        """Return the command that starts the servers of one machine. `number` ends the name of their folder."""
        size = self.config.vllm.vllm_tensor_parallel_size
        devices = [",".join(map(str, range(i * size, (i + 1) * size))) for i in range(self.num_servers())]
        settings = [f"vllm_num_servers={len(devices)}", f"vllm_server_devices={json.dumps(devices)}"]
        if self.config.rollout.facts.shares_device:  # the config's share is for GPUs that also train
            settings.append("vllm_gpu_memory_utilization=0.9")
        before, _, after = yaml_text.one_line(f"{self.output_dir}/servers-0").rpartition("0")
        place = (f"train.output_dir={before}", number, after)
        return ["rl-vlm", "serve", *self.words, *settings, place, "--host", "0.0.0.0", "--port", str(SERVER_PORT)]

    def accelerate_words(self) -> Words:
        """Return the arguments of `accelerate launch`, which are equal on all machines, without `--machine_rank`."""
        cluster = self.cluster
        file = os.path.relpath(launch_file(cluster.sharding))
        options = ["--config_file", file if not file.startswith("..") else str(launch_file(cluster.sharding))]
        options += ["--num_processes", str(cluster.num_training * cluster.gpus)]
        if cluster.num_training > 1:
            options += ["--num_machines", str(cluster.num_training)]
            options += ["--main_process_ip", cluster.hosts[0], "--main_process_port", str(cluster.port)]
        else:
            options += ["--max_restarts", str(MOST_RESTARTS)]
        return [*options, "-m", "launch.train", *self.trainer_words()]


def launch_file(sharding: str) -> Path:
    """Return the path of a sharding's file for `accelerate launch`. The file may not exist."""
    return FILES / f"{sharding}.yaml"


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options for the machines."""
    parser.usage = (
        f"{parser.usage} [--nodes N] [--gpus N] [--sharding NAME] [--rollout-nodes N] [--hosts A,B,…] [--port PORT] "
        "[--slurm] [--time TIME]"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines that train; default: 1")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs of each machine; default: 8")
    with_file = listed_names(lambda sharding: launch_file(sharding.name).is_file())
    add_sharding(parser, with_file, "ddp")
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
        "--port", type=port, default=FIRST_PORT, metavar="PORT",
        help=f"free port of the first machine; default: {FIRST_PORT}",
    )  # fmt: skip
    parser.add_argument("--slurm", action="store_true", help="print one file for sbatch, which queues itself again")
    parser.add_argument("--time", metavar="TIME", help=f"time limit of the Slurm job; default: {DAY}")


def launch_command(config: RunConfig, options: argparse.Namespace) -> None:
    """Print the commands that start a run on several machines, or a job file for Slurm."""
    job = planned_job(config, options)
    check(job)
    print(slurm_file(job) if options.slurm else commands(job), end="")


def planned_job(config: RunConfig, options: argparse.Namespace) -> Job:
    """Return the job that the options describe. Raises ConfigError if a value is out of range."""
    num_hosts = options.nodes + options.rollout_nodes
    if min(options.nodes, options.gpus) < 1 or options.rollout_nodes < 0:
        raise ConfigError("--nodes and --gpus must be at least 1, and --rollout-nodes at least 0")
    if options.hosts is not None and options.slurm:
        raise ConfigError("--hosts: Slurm chooses the machines; leave it out")
    if options.time is not None and not options.slurm:
        raise ConfigError("--time is the limit of a Slurm job: add --slurm, or leave it out")
    if options.hosts is not None:
        check_hosts(options.hosts, num_hosts)
    batch_sizes(config, options.nodes * options.gpus)  # refuse large numbers before the lists below get long
    hosts = options.hosts or [Shell(f"${{hosts[{i}]}}") if options.slurm else f"node-{i}" for i in range(num_hosts)]
    cluster = Cluster(hosts, options.nodes, options.gpus, options.sharding or "ddp", options.port)
    path = options.config if not options.config.startswith("-") else f"./{options.config}"  # not an option
    job = Job(config, [path, *options.overrides], cluster, DAY if options.time is None else options.time)
    if options.slurm:
        check_time(job.time, job.warning_seconds)
    return job


def check_hosts(hosts: Sequence[str], number: int) -> None:
    """Raise ConfigError unless `hosts` are names or addresses of `number` different machines."""
    for host in hosts:
        if not is_host(host):
            raise ConfigError(
                f"--hosts: {host!r} is no name or IPv4 address of a machine; give them separated by commas, as in a,b"
            )
    if len(hosts) != number:
        raise ConfigError(f"--hosts has {len(hosts)} names for {number} machines; give one for each")
    if twice := [host for host in hosts if hosts.count(host) > 1]:
        raise ConfigError(f"--hosts names {twice[0]} twice; each machine has one entry")
    if number > 1 and (local := [host for host in hosts if host in LOCAL_HOSTS or host.startswith("127.")]):
        raise ConfigError(
            f"--hosts: {local[0]} names a different machine on each of them; give a name that all can reach"
        )


def is_host(text: str) -> bool:
    """Return whether the text is a host name or an IPv4 address that a machine can have."""
    if re.fullmatch(r"[0-9.]+", text, re.ASCII):
        try:
            return not ipaddress.IPv4Address(text).is_unspecified
        except ValueError:
            return False
    return HOST_NAME.fullmatch(text) is not None


def check_time(text: str, warning: int) -> None:
    """Raise ConfigError unless `text` is a time limit of Slurm that is longer than `warning`.

    Slurm tells the run to save `warning` seconds before the limit, at most `LONGEST_WARNING`.
    """
    found = SLURM_TIME.fullmatch(text)
    if found is None:
        raise ConfigError(f"--time {text!r} is no time limit of Slurm: write hours:minutes:seconds, or days-hours")
    if warning > LONGEST_WARNING:
        raise ConfigError(
            f"`stop_grace_seconds` asks for a signal {warning} s before the time limit, but Slurm sends it at most "
            f"{LONGEST_WARNING} s before: set it lower"
        )
    numbers = {name: int(value or 0) for name, value in found.groupdict().items()}
    minutes = numbers["minutes"] + numbers["m"] + numbers["alone"]
    hours = 24 * numbers["days"] + numbers["hours"] + numbers["h"]
    seconds = 3600 * hours + 60 * minutes + numbers["seconds"] + numbers["s"]
    if seconds <= warning:
        raise ConfigError(
            f"--time {text} is {seconds} s, but Slurm signals the run to save {warning} s before the end: set it "
            "higher, or set `stop_grace_seconds` lower"
        )


def check(job: Job) -> None:
    """Raise an error if the settings show that the run would fail on these machines."""
    cluster = replace(job.cluster, hosts=[f"node-{i}" for i in range(len(job.cluster.hosts))])
    size = job.config.vllm.vllm_tensor_parallel_size
    if cluster.num_sampling and size > cluster.gpus:
        raise ConfigError(
            f"`vllm_tensor_parallel_size` {size} is more than the {cluster.gpus} GPUs of a machine with servers"
        )
    if cluster.num_sampling and job.num_servers() > LAST_PORT - SERVER_PORT:
        raise ConfigError(f"--gpus {cluster.gpus}: its servers need more ports than there are from {SERVER_PORT} on")
    path, *overrides = map("".join, replace(job, cluster=cluster).trainer_words())
    config = load_config(path, overrides)
    check_trainable(config)
    setup_problems(config, SHARDINGS[cluster.sharding], cluster.num_training * cluster.gpus).refuse()


def commands(job: Job) -> str:
    """Return the commands of each machine."""
    cluster = job.cluster
    token = f"export RL_VLM_SERVER_TOKEN={secrets.token_urlsafe(32)}\n" if cluster.num_sampling else ""
    before = f"cd {shlex.quote(os.getcwd())}\n{token}export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.shutdown_seconds}\n"
    parts = ["# Every machine needs the same environment, and this directory on a file system that all share.\n"]
    for i, host in enumerate(cluster.hosts[cluster.num_training :]):
        parts.append(f"# On {host}:\n{before}{shell(job.server_words(str(i)))}\n")
    for i, host in enumerate(cluster.hosts[: cluster.num_training]):
        number = ["--machine_rank", str(i)] if cluster.num_training > 1 else []
        parts.append(f"# On {host}:\n{before}{shell(['accelerate', 'launch', *number, *job.accelerate_words()])}\n")
    return "\n".join(parts)


def slurm_file(job: Job) -> str:
    """Return a job file for sbatch."""
    cluster, last = job.cluster, job.cluster.num_training
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(job.output_dir).name).strip("-") or "rl-vlm"
    return SLURM.format(
        name=name, nodes=len(cluster.hosts), gpus=cluster.gpus, time=job.time, before=job.warning_seconds,
        shutdown=job.shutdown_seconds, output_dir=shlex.quote(os.path.abspath(job.output_dir)),
        folder=shlex.quote(os.getcwd()), num_training=last, launcher=shell(job.accelerate_words()),
        servers=slurm_servers(job) if cluster.num_sampling else "",
    )  # fmt: skip


def slurm_servers(job: Job) -> str:
    """Return the lines that start rollout servers on the last machines of a Slurm job."""
    first, last = job.cluster.num_training, len(job.cluster.hosts) - 1
    return SERVERS.format(first=first, last=last, command=shell(job.server_words(Shell("$i"))))


def shell(words: Words) -> str:
    """Format a command for the shell, with a line for each option."""
    text = ""
    for word in map(quoted, words):
        begins = word.startswith("-") and not text.endswith("-m ")
        text += (" \\\n    " if begins and text else " " if text else "") + word
    return text


def quoted(word: Argument) -> str:
    """Quote a word for the shell, except its parts of class `Shell`, which the shell expands."""
    parts = (word,) if isinstance(word, str) else word
    joined = [
        text if is_expanded else shlex.quote(text)
        for is_expanded, group in groupby(parts, lambda part: isinstance(part, Shell))
        if (text := f'"{"".join(group)}"' if is_expanded else "".join(group))
    ]
    return "".join(joined) or "''"


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
