from __future__ import annotations

import pytest

from rl_vlm.config.schema import TrainConfig
from rl_vlm.run.history import Record


def test_the_first_evaluation_is_the_one_before_training() -> None:
    record = Record()
    record.note_evaluation({"reward": 0.25}, 0, TrainConfig())
    record.note_evaluation({"reward": 0.5}, 4, TrainConfig())
    assert (record.eval_before, record.eval_latest) == ({"reward": 0.25}, {"reward": 0.5})
    later = Record()
    later.note_evaluation({"reward": 0.5}, 4, TrainConfig())
    assert later.eval_before is None


def test_a_step_stays_unevaluated_if_its_evaluation_fails() -> None:
    record = Record()
    with record.evaluating({"step": 1}):
        assert record.unevaluated == {"step": 1}
    assert record.unevaluated is None
    with pytest.raises(OSError, match="disk"), record.evaluating({"step": 2}):
        raise OSError("disk")
    assert record.unevaluated == {"step": 2}
