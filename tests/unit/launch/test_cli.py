import logging
import shlex
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from launch import cli, evaluate, serve, train
from launch.help import MOST_USED
from rl_vlm.config.load import FULL_NAMES, load_config
from rl_vlm.config.schema import VLLMConfig
from rl_vlm.errors import ConfigError, DataError, RolloutError


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {model_name_or_path: tiny}\ndata: {dataset_name: d, eval_dataset_name: e}\n"
        "rewards: {reward_funcs: choice}\n"
    )
    return str(path)


def test_dry_run_prints_the_resolved_run(config, capsys):
    assert cli.main(["train", config, "--dry-run", "max_steps=10"]) == 0
    printed = capsys.readouterr().out
    assert "  max_steps: 10\n" in printed
    assert "# Optimizer step: 1 prompts × 8 = 8 completions, all on one process.\n" in printed
    assert "# Checked: reward functions choice.\n" in printed
    assert "# Not checked: train data: d is not here" in printed


def test_an_evaluation_sets_the_allocator_before_it_starts(config, capsys, monkeypatch):
    configured = []
    monkeypatch.setattr(cli, "configure_allocator", configured.append)

    def compare(config, *_):
        assert configured == [config]
        raise ConfigError("started")

    monkeypatch.setattr("rl_vlm.evaluation.run.compare_checkpoints", compare)
    assert cli.main(["eval", config]) == 2
    assert "started" in capsys.readouterr().err


def test_overrides_may_stand_before_and_after_options(config, capsys):
    assert cli.main(["eval", config, "seed=1", "--dry-run", "top_p=0.5"]) == 0
    printed = capsys.readouterr().out
    assert "  seed: 1\n" in printed
    assert "  top_p: 0.5\n" in printed


def test_errors_are_messages_with_status_2(config, capsys):
    assert cli.main(["train", config, "max_step=1"]) == 2
    assert capsys.readouterr().err == (
        f"rl-vlm train {config} failed:\ncommand line: unknown setting `max_step`; the closest is `train.max_steps`\n"
    )


def test_batches_without_a_solution_end_a_dry_run(config, capsys):
    assert cli.main(["train", config, "--dry-run", "num_generations=6"]) == 2
    assert "nearest valid" in capsys.readouterr().err


def test_training_needs_training_data_and_evaluation_does_not(config, capsys):
    assert cli.main(["train", config, "--dry-run", "dataset_name=null"]) == 2
    assert "`data.dataset_name`, the training data, is not set" in capsys.readouterr().err
    assert cli.main(["eval", config, "--dry-run", "dataset_name=null"]) == 0


def test_evaluation_needs_held_out_data(config, capsys):
    assert cli.main(["eval", config, "--dry-run", "eval_dataset_name=null"]) == 2
    assert "`data.eval_dataset_name`, the held-out data, is not set" in capsys.readouterr().err


def test_flags_of_an_evaluation_and_overrides_may_be_mixed(config, monkeypatch):
    seen = []
    monkeypatch.setitem(cli.COMMANDS, "eval", lambda run, options: seen.append((run, options)))
    flags = ["--by", "source", "--checkpoint", "a", "seed=3", "--by", "kind", "--checkpoint", "b", "--keep", "0.1..0.9"]
    assert cli.main(["eval", config, *flags, "top_p=0.5"]) == 0
    ((run, options),) = seen
    assert (run.train.seed, run.rollout.top_p) == (3, 0.5)
    assert (options.by, options.checkpoint, options.keep) == (["source", "kind"], ["a", "b"], (0.1, 0.9))


@pytest.mark.parametrize("text", ["0.5", "0.9..0.1", "a..b", "0..2", "-1..1", "nan..1"])
def test_ranges_that_are_none(text, config, capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", config, f"--keep={text}"])
    assert f"{text!r} is no range of success rates from 0 to 1, such as 0.1..0.9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "CONFIG", "--port", "99999"], "argument --port: '99999' is no port: give a number from 1 to 65535"),
        (["serve", "CONFIG", "--port", "0"], "argument --port: '0' is no port"),
        (["serve", "CONFIG", "--host", ""], "argument --host: '' is no host"),
        (["chat", "FOLDER", "--host", "\udcff"], "argument --host: '\\udcff' is no host"),
        (["chat", "FOLDER", "--port", "65536"], "argument --port: '65536' is no port"),
        (["chat", "ADAPTER"], "adapter_config.json has the base_model_name_or_path 3: write the adapter again"),
        (["chat", "LIST"], "adapter_config.json holds no JSON object"),
        (["plan", "CONFIG", "--gpu-memory", "80GB", "--picture", "nowhere/x.png"], "there is no directory nowhere"),
        (["plan", "CONFIG", "--gpu-memory", "80GB", "--picture", "FOLDER"], "it is a directory; name a file"),
        (["plan", "CONFIG", "--gpu-memory", "80GB", "--picture", "x"], "--picture x has no ending"),
        (["plan", "CONFIG", "--gpu-memory", ""], "`--gpu-memory` ''"),
        (["plan", "CONFIG", "--gpu-memory", "80GB", "--config_file", "a\0b"], "is no path here: embedded null byte"),
        (["plan", "CONFIG", "--gpu-memory", "80GB", "--config_file", ""], "argument --config_file: it is empty"),
        (["doctor", "CONFIG", "--json", "nowhere/x"], "--json nowhere/x cannot be written: there is no directory"),
        (["doctor", "CONFIG", "--ranks", "--pixels"], "--pixels compares images of rows, which --ranks does not read"),
        (["report", "x" * 5000], "is no path here: [Errno 36] File name too long"),
        (["report", "RUN", "--output", ""], "argument --output: it is empty"),
        (["export", "x" * 5000], "is no path here: [Errno 36] File name too long"),
        (["export", "RUN", "--to", "a\0b"], "is no path here: embedded null byte"),
        (["rewards", "show", ""], "argument NAME: it is empty"),
        (["rewards", "check", "", "--data", "d"], "argument CONFIG_OR_FUNCTION: it is empty"),
        (["rewards", "check", "exact_match", "--data", ""], "argument --data: it is empty"),
    ],
)
def test_arguments_that_cannot_be_are_named(words, said, config, tmp_path, capsys, monkeypatch):
    places = {"CONFIG": config} | {name: str(tmp_path / name) for name in ("FOLDER", "RUN", "ADAPTER", "LIST")}
    for name, content in (("ADAPTER", '{"base_model_name_or_path": 3}'), ("LIST", "[1]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(content)
    (tmp_path / "FOLDER").mkdir()
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main([places.get(word, word) for word in words])
    except SystemExit as end:  # of argparse
        status = end.code
    assert status == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train", "CONFIG", "--dry-run"], ["chat", "x"], ["doctor", "CONFIG"]])
def test_launch_variables_that_are_no_numbers_are_named(words, config, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert cli.main([config if word == "CONFIG" else word for word in words]) == 2
    assert "the launch variable WORLD_SIZE is 'two'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "x"), ("RANK", "5"), ("MASTER_PORT", "x"), ("WORLD_SIZE", "9" * 5000)]
)
def test_a_refusal_of_launch_variables_asks_no_other_process(name, value, config, capsys, monkeypatch):
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for variable, text in (launched | {name: value}).items():
        monkeypatch.setenv(variable, text)
    assert cli.main(["train", config]) == 2
    assert "the launch variable" in capsys.readouterr().err


def test_training_has_no_flags_of_an_evaluation(config, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", config, "--by", "source"])
    assert "unrecognized arguments: --by" in capsys.readouterr().err


def test_training_refuses_an_endpoint(config, capsys):
    url = "endpoint_url=http://localhost:8000/v1"
    assert cli.main(["train", config, "--dry-run", url]) == 2
    assert "`evaluation.endpoint_url` is for `rl-vlm eval`" in capsys.readouterr().err
    assert cli.main(["eval", config, "--dry-run", url]) == 0
    assert cli.main(["eval", config, "--dry-run", "endpoint_url=localhost:8000"]) == 2


def test_of_several_processes_the_first_alone_speaks(config, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", config, "--dry-run"]) == 0
    assert cli.main(["train", config, "max_step=1"]) == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("LOCAL_RANK", "0")  # on another machine, whose file may be another
    assert cli.main(["train", config, "max_step=1"]) == 2
    assert "unknown setting `max_step`" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["train", config, "--dry-run"]) == 0
    assert "1 prompts on each of 2 processes" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "printed"), [(ConfigError("bad"), False), (DataError("row 3"), True)])
def test_an_error_of_one_process_alone_is_printed_by_it(config, capsys, monkeypatch, error, printed):
    def fail(*_):
        raise error

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setitem(cli.COMMANDS, "train", fail)
    assert cli.main(["train", config]) == 2
    assert (str(error) in capsys.readouterr().err) is printed


@pytest.mark.parametrize(("rank", "shown"), [("0", "loading\ncareful\n"), ("1", "careful\n")])
def test_the_log_is_shown_while_a_command_runs(config, capsys, monkeypatch, rank, shown):
    def command(*_):
        logging.getLogger("rl_vlm.run.run").info("loading")
        logging.getLogger("rl_vlm.run.run").warning("careful")
        logging.getLogger("transformers").info("nothing")

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setitem(cli.COMMANDS, "train", command)
    assert cli.main(["train", config]) == 0
    assert capsys.readouterr().err == shown
    assert not logging.getLogger("rl_vlm").handlers


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train", "Interrupted. There is no checkpoint in {}/run"),
        ("eval", "Interrupted. Finished samples are kept in {}/run/evaluation;"),
    ],
)
def test_ctrl_c_ends_a_command_without_frames(config, name, said, capsys, monkeypatch, tmp_path):
    def interrupted(*_):
        import rl_vlm.run.run  # noqa: F401 — as the command does

        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, name, interrupted)
    assert cli.main([name, config, f"output_dir={tmp_path}/run"]) == 130
    blank, line = capsys.readouterr().err.splitlines()
    assert blank == "" and line.startswith(said.format(tmp_path))


@pytest.mark.parametrize(("module", "name"), [(train, "train"), (evaluate, "eval")])
def test_the_modules_run_the_same_commands(module, name, config, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"launch.{module}", config, "nonsense=1"])
    assert module.main() == 2
    assert capsys.readouterr().err.startswith(f"rl-vlm {name} {config} failed:")


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")
def test_serve_hands_on_the_words_of_the_trainer(config, monkeypatch):
    seen = []
    monkeypatch.setattr(serve, "serve", lambda *arguments: seen.append(arguments))
    assert cli.main(["serve", config, "seed=3", "--host", "0.0.0.0", "top_p=0.5", "--port=8000"]) == 0
    assert cli.main(["serve", config, "--dry-run"]) == 0
    assert cli.main(["serve", config]) == 0
    (run, *rest), (_, *defaults) = seen
    assert (run.train.seed, run.rollout.top_p) == (3, 0.5)
    assert run.rollout.engine == "vllm_server"
    assert rest == [[config, "seed=3", "top_p=0.5"], "0.0.0.0", 8000]
    assert defaults == [[config], "127.0.0.1", None]


def test_the_way_to_join_servers_is_a_shell_command(config, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-b")
    urls = [serve.reachable("http://0.0.0.0:8000"), serve.reachable("http://127.0.0.1:8001")]
    *_, export, command = serve.how_to_join(
        urls, "secret", ["my run.yaml", "system_prompt=Think."], VLLMConfig()
    ).splitlines()
    assert export.split() == ["export", "RL_VLM_SERVER_TOKEN=secret"]
    joined = "vllm_server_base_url=[http://node-b:8000,http://127.0.0.1:8001]"
    expected = ["my run.yaml", "system_prompt=Think.", "rollout.engine=vllm_server", joined]
    assert shlex.split(command) == ["rl-vlm", "train", *expected]
    vllm = load_config(config, expected[2:]).vllm
    assert vllm.vllm_server_base_url == ["http://node-b:8000", "http://127.0.0.1:8001"]


def test_serve_uses_settings_of_vllm_whatever_the_engine(config, monkeypatch):
    seen = []
    monkeypatch.setattr(serve, "serve", lambda *arguments: seen.append(arguments))
    starting = ["vllm_num_servers=2", "vllm.vllm_server_devices=['0','1']"]
    assert cli.main(["serve", config, "rollout.engine=hf", "vllm_max_model_length=9", *starting]) == 0
    ((run, words, *_),) = seen
    assert (run.rollout.engine, run.vllm.vllm_max_model_length, run.vllm.vllm_num_servers) == ("vllm_server", 9, 2)

    *_, command = serve.how_to_join(["http://a:1"], "secret", words, run.vllm).splitlines()
    _, _, path, *overrides = shlex.split(command)
    joined = load_config(path, overrides)
    assert (joined.rollout.engine, joined.vllm.vllm_server_base_url) == ("vllm_server", ["http://a:1"])
    assert (joined.vllm.vllm_max_model_length, joined.vllm.vllm_num_servers) == (None, 1)  # read by servers alone


@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt(), 0), (RolloutError("server 1 has ended"), 2)])
def test_serve_stays_until_it_is_stopped_or_a_server_ends(end, status, config, capsys, monkeypatch):
    from transformers import Qwen2_5_VLConfig

    from rl_vlm.data import prompts
    from rl_vlm.rollout import build
    from rl_vlm.rollout.vllm import arguments
    from rl_vlm.rollout.vllm import process as vllm_process

    class Server:
        url, seen = "http://127.0.0.1:8000", []

        def check_running(self) -> None:
            raise end

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(arguments, "checkpoint_config", lambda *_: Qwen2_5_VLConfig())
    monkeypatch.setattr(prompts, "load_processor", lambda *_: None)  # the model is on the hub
    monkeypatch.setattr(build, "builder_for", lambda *_: None)
    monkeypatch.setattr(vllm_process, "start_servers", lambda *_: [Server()])
    monkeypatch.setattr(vllm_process, "wait_until_healthy", lambda servers, *_: servers[0].seen.append("healthy"))
    monkeypatch.setattr(vllm_process, "stop_servers", lambda servers: servers[0].seen.append("stopped"))
    monkeypatch.setenv("RL_VLM_SERVER_TOKEN", "secret")
    assert cli.main(["serve", config, "--host", "10.0.0.7"]) == status
    assert Server.seen == ["healthy", "stopped"]
    printed = capsys.readouterr()
    assert f"rl-vlm train {config} rollout.engine=vllm_server 'vllm_server_base_url=[{Server.url}]'" in printed.out
    assert "WARNING: other machines can reach the servers on 10.0.0.7" in printed.err
    assert printed.err.endswith(f"rl-vlm serve {config} failed:\n{end}\n") is (status == 2)


@pytest.mark.parametrize(
    ("setting", "rank"),
    [(["seed=0"], None), (["use_peft=true", "lora_r=4"], 4), (["lora_sync=merge"], None)],
)
def test_the_rank_of_the_adapter_that_will_be_sent(setting, rank, config, tmp_path):
    settings = [config, ["rollout.engine=vllm_server", *setting, f"model_name_or_path={tmp_path}"]]
    assert serve.sent_adapter_rank(load_config(*settings), str(tmp_path)) == rank
    (tmp_path / "adapter_config.json").write_text('{"r": 2}')
    assert serve.sent_adapter_rank(load_config(*settings), str(tmp_path)) == (
        None if setting == ["lora_sync=merge"] else 2
    )


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["eval", "--help"], ["serve", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "CONFIG [KEY=VALUE ...] [--dry-run]" in printed
    assert ("  learning_rate: number = 1.0e-06\n" in printed) is (len(arguments) == 2)
    assert len(printed.splitlines()) < 110
    assert "  adam_beta1" not in printed


@pytest.mark.parametrize(
    ("arguments", "shown", "hidden"),
    [
        (["--help-all"], ["  adam_beta1: number = 0.9\n", "  learning_rate: ", "  timeout: "], []),
        (
            ["--help", "rollout"],
            ["  min_p: ", "  num_generations: whole number = 8\n"],
            ["learning_rate", "  timeout: "],
        ),
        (["--help", "rewards"], ["  reward_weights: ", "  timeout: "], ["learning_rate"]),
    ],
)
def test_help_of_all_settings_and_of_a_section(arguments, shown, hidden, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", *arguments])
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    assert [text for text in shown if text not in printed] == [text for text in hidden if text in printed] == []


def test_without_a_command_there_are_the_commands_to_know(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("  ")] == [
        "new", "train", "eval", "doctor", "plan", "report", "rl-vlm", "cd", "rl-vlm",
    ]  # fmt: skip
    assert "  train   Train a model with GRPO.\n" in printed
    assert "\n  rl-vlm new my_task\n" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "x.yaml"], "there is no command 'trian' (did you mean 'train'?); commands: train, eval, "),
        (["reprot"], "(did you mean 'report'?)"),
        (["zzz"], "there is no command 'zzz'; commands: train, "),
        (["configs/digits.yaml"], "is no command, but a config (did you mean `rl-vlm train configs/digits.yaml`?)"),
        (["run.yml", "max_steps=1"], "(did you mean `rl-vlm train run.yml`?)"),
    ],
)
def test_words_that_are_no_command(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_help_of_no_section(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help", "rolout"])
    assert stop.value.code == 2
    assert "--help rolout: there is no such section; sections: model, data, rollout" in capsys.readouterr().err


def test_the_most_used_settings_exist():
    assert [name for name in MOST_USED if name not in FULL_NAMES] == []


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"rl-vlm {version('rl-vlm')}\n")


def test_help_and_config_errors_need_no_torch(config):
    program = (
        "import sys; from launch.cli import main\n"
        "status = main(['train', sys.argv[1], 'max_step=1'])\n"
        "assert status == 2 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, config], check=True, capture_output=True)


LEAVES = """
import atexit, gc, multiprocessing, os, signal, sys, threading, time
from launch import cli
from rl_vlm.distributed.signals import handled

def stay(): time.sleep(600)

def use_store():
    from torch.distributed import TCPStore
    store = TCPStore("127.0.0.1", 0, None, True)
    def use():
        while True:
            store.set("beat", "0")
    for _ in range(4):
        threading.Thread(target=use, daemon=True).start()
    time.sleep(0.1)

def main():
    print("written")
    if "thread" in sys.argv:
        threading.Thread(target=stay, name="stays").start()
    if "process" in sys.argv:
        multiprocessing.get_context("fork").Process(target=stay, name="stays").start()
    if "store" in sys.argv:
        use_store()
    if "signal" in sys.argv:
        with handled():
            pass
        atexit.register(print, "signalled", os.kill(os.getpid(), signal.SIGTERM))
    if "error" in sys.argv:
        raise ValueError("no luck")
    if "usage" in sys.argv:
        cli.main(["train"])
    if "open" in sys.argv:  # as a reward function keeps its log
        global log
        log = open(sys.argv[-1], "w")
        log.write("of a function")
        gc.freeze()  # as after the imports of a run
    if "full" in sys.argv:
        sys.stdout = open("/dev/full", "w")
        print("lost")
        return 0
    return 3

cli.EXIT_SECONDS = 600 if "short" in sys.argv else 0.5
cli.end_process_after(main)
"""


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("thread", 3, "threads or processes of users' functions still run: stays. They"),
        ("process", 3, "threads or processes of users' functions still run: stays. They"),
        ("thread error", 1, "ValueError: no luck"),
        ("short", 3, ""),
        ("short error", 1, "ValueError: no luck"),
        ("short usage", 2, "the following arguments are required: CONFIG"),
        ("short signal", 3, ""),
        ("short store", 3, ""),
    ],
)
@pytest.mark.ci
def test_a_finished_command_ends_whatever_users_functions_left(words, status, said):
    command = [sys.executable, "-c", LEAVES, *words.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (status, "written\n" + "signalled None\n" * ("signal" in words))
    assert said in result.stderr
    assert ("rl-vlm has finished" in result.stderr) is ("short" not in words)


def test_what_is_still_buffered_is_written(tmp_path):
    command = [sys.executable, "-c", LEAVES, "short", "open", str(tmp_path / "log")]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 3
    assert (tmp_path / "log").read_text() == "of a function"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="the system has no /dev/full")
def test_output_that_cannot_be_written_is_no_success():
    result = subprocess.run(
        [sys.executable, "-c", LEAVES, "short", "full"], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, "output could not be written" in result.stderr) == (1, True)
