"""What the launcher asks for, from the environment variables of `accelerate launch`."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.distributed.environment import take_launch


@pytest.mark.parametrize(("named", "expected"), [({}, "auto"), ({"gradient_accumulation_steps": 1}, 1)])
def test_a_batch_size_that_a_json_leaves_out_is_the_runs(
    named: dict[str, Any], expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **named}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "zero.json"))
    assert take_launch().deepspeed["gradient_accumulation_steps"] == expected
