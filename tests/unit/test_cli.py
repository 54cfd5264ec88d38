import subprocess
import sys
from pathlib import Path

import pytest

from launch import cli, evaluate, train
from rl_vlm.errors import ConfigError, DataError


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: tiny\ndataset_name: d\neval_dataset_name: e\nreward_funcs: choice\n")
    return str(path)


def test_dry_run_prints_the_resolved_run(config, capsys):
    assert cli.main(["train", config, "--dry-run", "max_steps=10"]) == 0
    printed = capsys.readouterr().out
    assert "  max_steps: 10\n" in printed
    assert "# Optimizer step: 1 prompts × 8 = 8 completions, all on one process.\n" in printed


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
    assert cli.main(["train", config, "--dry-run", "dataset_name="]) == 2
    assert "`data.dataset_name`, the training data, is not set" in capsys.readouterr().err
    assert cli.main(["eval", config, "--dry-run", "dataset_name="]) == 0


def test_evaluation_needs_held_out_data(config, capsys):
    assert cli.main(["eval", config, "--dry-run", "eval_dataset_name="]) == 2
    assert "`data.eval_dataset_name`, the held-out data, is not set" in capsys.readouterr().err


def test_of_several_processes_the_first_alone_speaks(config, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", config, "--dry-run"]) == 0
    assert cli.main(["train", config, "max_step=1"]) == 2
    assert capsys.readouterr() == ("", "")
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


@pytest.mark.parametrize(("module", "name"), [(train, "train"), (evaluate, "eval")])
def test_the_modules_run_the_same_commands(module, name, config, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"launch.{module}", config, "nonsense=1"])
    assert module.main() == 2
    assert capsys.readouterr().err.startswith(f"rl-vlm {name} {config} failed:")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["eval", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "CONFIG [KEY=VALUE ...] [--dry-run]" in printed
    assert ("  learning_rate: float = 1e-06\n" in printed) is (len(arguments) == 2)


def test_help_and_config_errors_need_no_torch(config):
    program = (
        "import sys; from launch.cli import main\n"
        "status = main(['train', sys.argv[1], 'max_step=1'])\n"
        "assert status == 2 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, config], check=True, capture_output=True)
