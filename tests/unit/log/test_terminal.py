"""Known lines of other libraries are dropped by name, and unknown ones of the same loggers stay."""

import logging
import logging.config
import warnings

import pytest

from rl_vlm.log.terminal import shown_log


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture):
    """Return a function that logs a warning, and returns whether it is handled."""

    def warn(name: str, message: str, *values: object) -> bool:
        caplog.clear()
        logging.getLogger(name).warning(message, *values)
        return bool(caplog.records)

    return warn


@pytest.mark.parametrize(
    ("name", "known", "unknown"),
    [
        (
            "vllm.model_executor.model_loader.reload.layerwise",
            ("%s: Failed to load weights", "RotaryEmbedding"),
            ("%s: Failed to read weights", "RotaryEmbedding"),
        ),
        (
            "vllm.v1.worker.cpu_worker",
            ("CPU backend doesn't allow to use `torch.set_num_threads` after the thread binding, skip it.",),
            ("sleep mode is not supported on CPU, ignore it.",),
        ),
        (
            "DeepSpeed",
            ("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.",),
            ("We are Setting accelerator to CPU",),
        ),
    ],
)
def test_known_lines_of_a_logger_are_dropped_and_others_stay(name, known, unknown, warned):
    with shown_log():
        assert not warned(name, *known)
        assert warned(name, *unknown)
        assert warned(f"{name}.inner", *known)  # another logger


def test_known_lines_stay_dropped_if_vllm_configures_its_loggers_again(warned):
    with shown_log():
        loggers = {"vllm": {"level": "WARNING", "propagate": True}}
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "loggers": loggers})
        assert not warned("vllm.config.vllm", "Enforce eager set, disabling torch.compile, CUDAGraphs")


def test_known_python_warnings_are_dropped_and_others_stay():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with shown_log():
            warnings.warn("`torch.distributed.reduce_op` is deprecated, please use …", FutureWarning, stacklevel=1)
            warnings.warn("`torch.distributed.reduce_op` is deprecated, please use …", UserWarning, stacklevel=1)
            warnings.warn("`torch.reduce_op` is deprecated", FutureWarning, stacklevel=1)
            tied = "Model has `tie_word_embeddings=True` and a tied layer is part of the adapter, but"
            warnings.warn(f"{tied} `ensure_weight_tying` is not set to True.", UserWarning, stacklevel=1)
    assert [(each.category, str(each.message)[:20]) for each in caught] == [
        (UserWarning, "`torch.distributed.r"),
        (FutureWarning, "`torch.reduce_op` is"),
    ]
