"""`rl-vlm migrate`: conversions, and files that cannot be read."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch import cli
from rl_vlm.config.elsewhere import instead_of
from tests.helpers.pages import ROOT, block


def migrate(*words: str) -> int:
    return cli.main(["migrate", *words])


SWIFT = "swift rlhf --rlhf_type grpo --model m --dataset d.jsonl --reward_funcs accuracy "
EASYR1 = "python3 -m verl.trainer.main worker.actor.model.model_path=m "
VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=d.parquet "


def output(text: str, tmp_path: Path, capsys, *words: str) -> str:
    (tmp_path / "run.sh").write_text(text)
    migrate(str(tmp_path / "run.sh"), *words)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("NPROC_PER_NODE=4 " + SWIFT + "--per_device_train_batch_size 4 --gradient_accumulation_steps 2",
         ["  prompts_per_step: 4"]),
        ("NPROC_PER_NODE=4 NNODES=2 " + SWIFT + "--per_device_train_batch_size 4 --steps_per_generation 3",
         ["  prompts_per_step: 4", "  steps_per_generation: 3", "# - rl-vlm launch THIS_FILE --nodes 2 --gpus 4 "
          "(docs/distributed.md)"]),
        (SWIFT + "--per_device_train_batch_size 3",
         ["# - line 1: per_device_train_batch_size: 3: 3 completions × 1 micro-steps × 1 processes are not whole "
          "groups of 8; choose `train.prompts_per_step`"]),
        ("NPROC_PER_NODE=$N " + SWIFT + "--per_device_train_batch_size 16",
         ["  per_device_train_batch_size: 16",
          "# - the number of processes is not written as a number, so batches are those of a process"]),
        ("FPS=1 NFRAMES=8 FPS_MIN_FRAMES=2 FPS_MAX_FRAMES=32 VIDEO_MIN_PIXELS=784 VIDEO_MAX_PIXELS=50176 "
         "VIDEO_TOTAL_PIXELS=900000 " + SWIFT,
         ["  fps: 1", "  num_frames: 8", "  min_frames: 2", "  max_frames: 32", "  video_min_pixels: 784",
          "  video_max_pixels: 50176", "  video_total_pixels: 900000"]),
        (SWIFT + "--learning_rate $LR", ["# - ${LR}: in learning_rate of the script, which is not written here"]),
        ("LR=3e-6\n" + SWIFT + "--learning_rate ${LR:-1}", ["  learning_rate: 3.0e-06"]),
        (SWIFT + "--learning_rate ${LR:-2e-6}", ["  learning_rate: 2.0e-06"]),
        (SWIFT + "--num_generation 4",
         ["# - line 1: num_generation: 4: `rl-vlm migrate` does not know this setting (did you mean "
          "'num_generations'?)"]),
        (SWIFT + "\\\n # --beta 0.1 \\\n --max_length 9",
         ["# - line 3: `--max_length` is not part of a command: the line before it ends without a backslash, or with "
          "a comment"]),
        ("if true; then\n" + SWIFT + "\nfi", ["# - line 1: `if` is not evaluated; every line was read once"]),
        (VERL + "data.train_batch_size=96 actor_rollout_ref.actor.ppo_mini_batch_size=64",
         ["# - line 1: data.train_batch_size: 96: a rollout of 96 prompts is not a multiple of the step's 64; choose "
          "`train.prompts_per_step`"]),
        (VERL + "data.train_batch_size=256 trainer.save_freq=5 trainer.total_training_steps=10 "
         "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_epochs=2",
         ["  prompts_per_step: 64", "  steps_per_generation: 4", "  save_steps: 40", "  max_steps: 80"]),
        (VERL + "actor_rollout_ref.actor.clip_ratio=0.3", ["  epsilon: 0.3"]),
        (VERL + "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=mse",
         ["# - default of verl: actor_rollout_ref.actor.kl_loss_coef: 0.001: the KL term is estimated by k3 "
          "(low_var_kl), not by mse; write `algorithm.beta` for that"]),
        (EASYR1 + "algorithm.kl_coef=0.01",
         ["# - line 1: algorithm.kl_coef: 0.01: there is no KL term in the reward; `algorithm.beta` is the weight of "
          "one in the loss"]),
        (EASYR1 + "algorithm.kl_coef=0.01 algorithm.use_kl_loss=true", ["  beta: 0.01"]),
        (VERL + "algorithm.adv_estimator=gae", ["# - line 1: algorithm.adv_estimator: gae: advantages are GRPO's; see "
                                                "`algorithm.scale_rewards` and `algorithm.turn_advantages`"]),
        (VERL + "algorithm.adv_estimator=gigpo algorithm.gamma=0.95 algorithm.gigpo.step_advantage_w=0.5 "
         "algorithm.gigpo.mode=mean_norm env.env_name=Sokoban env.max_steps=15 env.rollout.n=4",
         ["  turn_advantages: gigpo", "  turn_discount: 0.95", "  turn_weight: 0.5", "  scale_rewards: none",
          "  max_turns: 15", "  num_generations: 4"]),
        (VERL + "algorithm.adv_estimator=gigpo env.env_name=Sokoban env.history_length=4",
         [f"# - line 1: env.env_name: Sokoban: {instead_of('env.env_name')}",
          "# - line 1: env.history_length: 4: leave it out: the model sees the whole conversation at every turn"]),
        (VERL + "algorithm.gamma=0.95",
         ["# - line 1: algorithm.gamma: 0.95: all tokens of a completion have its advantage"]),
        (VERL + "rollout_manager.max_turns=3 rollout_manager.n_trajectory=4 rollout_manager.use_service=True",
         ["  max_turns: 3", "  num_generations: 4"]),
        (VERL + "custom_reward_function.path=r.py +custom_reward_function.reward_kwargs.scale=2",
         ["  - function: r.py:compute_score", "      scale: 2"]),
    ],
)  # fmt: skip
def test_conversions(text: str, lines: list[str], tmp_path, capsys):
    printed = output(text, tmp_path, capsys).replace("\n#   ", " ")  # without the wrapping of comments
    assert [line for line in lines if f"{line}\n" not in printed] == []


def test_one_can_name_the_system_of_ones_own_program(tmp_path, capsys):
    text = "accelerate launch --num_processes 2 my/train.py --model_name_or_path m --num_generations 4\n"
    assert "prompts_per_step: 4" in output(text, tmp_path, capsys, "--from", "vlm-r1")


def test_settings_that_change_no_result_need_no_work_by_hand(tmp_path, capsys):
    words = "--ddp_bucket_cap_mb 25 --neftune_noise_alpha 5"
    text = f"accelerate launch my/train.py --model_name_or_path m {words}\n"
    printed = output(text, tmp_path, capsys, "--from", "vlm-r1")
    by_hand, _, needless = printed.partition("# Not needed, because it is the default or has no meaning here:\n")
    assert "neftune_noise_alpha: 5" in by_hand and "leave it out" not in by_hand
    assert "ddp_bucket_cap_mb" in needless and "ddp_bucket_cap_mb" not in by_hand


def test_values_of_environment_variables_are_not_printed(tmp_path, capsys):
    printed = output(f"export WANDB_API_KEY=0123456789abcdef\n{SWIFT}", tmp_path, capsys)
    assert "$WANDB_API_KEY" in printed and "0123456789abcdef" not in printed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty; give a script or a YAML file of VLM-R1, EasyR1, verl or ms-swift"),
        (b" \n", "it is empty"),
        (b"\x7fELF\0\0", "it is no text, but a binary file"),
        (b"\xff\xfe", "it is no text in UTF-8"),
        (b"python train.py --lr 1\n", "it is not clear that it is for VLM-R1, EasyR1, verl or ms-swift; say it with "
         "--from NAME"),
        (b"learning_rate: 1.0\n", "it is not clear that it is for VLM-R1, EasyR1, verl or ms-swift"),
        (b"model: {model_name_or_path: m}\n", "`model` is a section of rl-vlm's own files: run `rl-vlm train"),
        (b"swift rlhf --beta 0.1 \\\n --beta 0.2\n", "line 1 and line 2 both give `--beta`; keep one of them"),
        (b"swift rlhf --learning_rate --beta 0.2\n", "line 1: `--learning_rate` has no value"),
        (b"swift rlhf --model --beta 0.2\n", "line 1: `--model` has no value"),
        (b"python -m verl.trainer.main_ppo data.seed=\n", "line 1: `data.seed=` has no value"),
        (b"cd x\nswift rlhf --system 'Think\n", "line 2: the quote ' does not close"),
        (b'swift rlhf --system "Think\n\n', 'line 1: the quote " does not close'),
        (b"swift rlhf --output_dir $(date\n", "line 1: $( does not close"),
        (b"cat <<END\nEND\nswift rlhf\n", "line 1: a here-document (`<<`) is not read"),
        (b"x" * 1_000_001, "it has more than 1,000,000 characters"),
        (b"worker: &a\n  actor: *a\n", "the YAML refers to itself, or is nested too deeply"),
        (b"swift rlhf --beta 1\nswift rlhf --beta 2\n", "it starts training several times, in lines 1 and 2"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read(content: bytes, message: str, tmp_path, capsys):
    (tmp_path / "run").write_bytes(content)
    assert migrate(str(tmp_path / "run")) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


def test_a_key_that_is_given_twice_in_yaml(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("rlhf_type: grpo\nrlhf_type: dpo\n")
    assert migrate(str(tmp_path / "run.yaml")) == 2
    assert "line 1: key `rlhf_type` is given twice" in capsys.readouterr().err


def test_wrong_arguments(tmp_path, capsys):
    assert migrate(str(tmp_path / "none.sh")) == 2
    assert "No such file or directory" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        migrate("x.sh", "--from", "slime")
    assert stop.value.code == 2
    assert "'slime' is no system: give one of VLM-R1, EasyR1, verl, ms-swift" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        migrate("--help")
    assert stop.value.code == 0
    assert "a shell script that starts a training" in " ".join(capsys.readouterr().out.split())


def test_the_command_imports_no_torch_and_executes_nothing(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"touch {tmp_path}/touched\nX=$(touch {tmp_path}/touched)\n{SWIFT} --output_dir $(pwd) $X\n")
    program = (
        "import sys; from launch.cli import main\n"
        "status = main(['migrate', sys.argv[1]])\n"
        "assert status == 1 and not {'torch', 'transformers', 'datasets'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program, str(script)], check=True, capture_output=True)
    assert not (tmp_path / "touched").exists()


def test_the_example_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs/migrate.md").read_text()
    printed = output(block(page, "bash", "torchrun"), tmp_path, capsys)
    for part in block(page, "yaml", "model:").split("# …\n"):
        assert part in printed
        printed = printed.partition(part)[2]
    assert printed == ""
