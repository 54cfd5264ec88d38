"""`rl-vlm migrate` on two published files of each system."""

import re
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from launch import cli
from rl_vlm.config.load import load_config

DATA = Path(__file__).parents[2] / "data" / "migrate"
FILES = {
    "vlm_r1_rec.sh": 1,
    "vlm_r1_jsonl.sh": 1,
    "swift_multi_gpu.sh": 1,
    "swift_lora.yaml": 0,
    "easyr1/examples/config.yaml": 1,
    "easyr1/examples/qwen2_5_vl_7b_geo3k_grpo.sh": 1,
    "verl_geo3k.sh": 1,
    "verl_lora.yaml": 1,
}
"""Two files of each system, and the exit status: 1 if something is left to do."""


@pytest.mark.parametrize("file", FILES)
def test_published_files(file: str, capsys, monkeypatch):
    monkeypatch.chdir(DATA)
    assert cli.main(["migrate", file]) == FILES[file]
    assert capsys.readouterr().out == (DATA / f"{file}.expected.yaml").read_text()


@pytest.mark.parametrize("file", FILES)
def test_the_results_load_when_they_are_filled_in(file: str, tmp_path):
    text = (DATA / f"{file}.expected.yaml").read_text()
    path = tmp_path / "run.yaml"
    path.write_text(re.sub(r"\$\{\w+\}|<\w+>", "/filled", text))
    assert load_config(path).model.model_name_or_path.startswith("Qwen/Qwen2.5-")


@pytest.mark.parametrize("file", FILES)
def test_a_part_of_a_file_is_translated_or_refused(file: str, capsys, monkeypatch):
    """A file may be cut anywhere, also in a quote or a variable."""
    text = (DATA / file).read_text()
    for end in range(0, len(text), len(text) // 15):
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(text[:end].encode())))
        assert cli.main(["migrate", "-"]) in (0, 1, 2)
        printed = capsys.readouterr()
        assert bool(printed.out) != bool(printed.err)


def test_easyr1s_setting_is_the_one_that_was_translated_by_hand(capsys, monkeypatch, tmp_path):
    """`configs/qwen2_5_vl_7b_full.yaml` lists its differences: pixels, rewards, memory and the place of the run."""
    monkeypatch.chdir(DATA)
    cli.main(["migrate", "easyr1/examples/qwen2_5_vl_7b_geo3k_grpo.sh"])
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    ours = load_config(DATA.parents[2] / "configs/qwen2_5_vl_7b_full.yaml").model_dump()
    theirs = load_config(tmp_path / "run.yaml").model_dump()
    differences = {
        name for section, settings in ours.items() for name in settings if settings[name] != theirs[section][name]
    }
    assert differences == {
        "dtype", "prompt_template", "max_pixels", "reward_funcs", "max_num_seqs", "vllm_gpu_memory_utilization",
        "vllm_tensor_parallel_size", "output_dir", "resume_from_checkpoint", "report_to", "run_name",
    }  # fmt: skip
