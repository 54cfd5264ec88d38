"""Places of a training step where the host would wait for a GPU, found on fake tensors of a device that is not here."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.tiny.build import build_tiny

ONCE_PER_STEP = {
    "trainer.py:update: _local_scalar_dense": "the loss, of which ranks agree on whether it is finite",
    "distributed/gradients.py:clip_gradients: _local_scalar_dense": "the norm of the gradients, for the same reason",
}
AFTER_ALL_MICRO_BATCHES = {
    "types/tensors.py:synchronize: synchronize": "log-probs of all micro-batches are on the host after it",
    "log/metrics.py:read_together: _to_copy to the host": "metrics of all micro-batches",
}
IN_TRANSFORMERS = {
    "model/vision.py:run": {
        "vision_utils.py:get_vision_position_ids: _local_scalar_dense": "reads the sizes of images",
        "vision_utils.py:get_vision_position_ids: _to_copy to the device": "sends the merge size",
        "vision_utils.py:get_vision_cu_seqlens: repeat_interleave": "as many values as images have frames",
        "vision_utils.py:get_vision_window_index: _local_scalar_dense": "reads the sizes of images",
        "vision_utils.py:get_vision_window_index: _to_copy to the device": "sends the ends of windows",
        "vision_utils.py:get_vision_window_index: unique_consecutive": "drops empty windows",
        "modeling_qwen2_5_vl.py:permute_input_for_window_attn: index by an index of the host": "the order of windows",
        "modeling_qwen2_5_vl.py:permute_input_for_window_attn: index_put by an index of the host": "its backward",
        "modeling_qwen2_5_vl.py:forward: index by an index of the host": "the order of windows, undone",
        "modeling_qwen2_5_vl.py:forward: index_put by an index of the host": "its backward",
        "generic.py:get_max_seqlen: _local_scalar_dense": "reads the longest window and image, once per run",
        "modeling_qwen2_5_vl.py:get_image_features: _local_scalar_dense": "splits features by image",
    },
    "model/body.py:run_body": {
        "import_utils.py:torch_compilable_check: _local_scalar_dense": "compares placeholders with features",
        "modeling_qwen2_5_vl.py:forward: masked_scatter_backward": "selects the gradients of features by placeholder",
    },
}
"""What is left within micro-batches, with the reason of each: transformers' own code, by the function that calls it."""
TIMEOUT = 500
"""Seconds."""
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 4.0, "freeze_vision_tower": True}
CASES: dict[str, dict[str, Any]] = {
    "trained tower": {},
    "frozen tower and reference": {"model": LORA, "algorithm": {"beta": 0.1}},
    "cut groups": {"memory": {"micro_batch_tokens": 80}},
    "dense rows": {"memory": {"prefix_sharing": "dense", "gradient_checkpointing": True}},
    "off policy, high entropies": {
        "rollout": {"max_rollout_tokens": 24},
        "algorithm": {"top_entropy_quantile": 0.5},
    },
}
NUM_PASSES = {"frozen tower and reference": 2, "off policy, high entropies": 2}
"""Passes over the micro-batches in a step, if there are more than that of training."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case found, in one process of its own: torch knows the device as long as a process lives."""
    checkpoint = build_tiny("qwen2_5_vl", tmp_path_factory.mktemp("host_syncs"))
    given: dict[str, Any] = {
        "model": {"model_name_or_path": str(checkpoint)},
        "rollout": {"num_generations": 4, "max_completion_length": 25},
        "algorithm": {"num_iterations": 2},  # log-probs of the first are kept
        "memory": {"micro_batch_tokens": 150, "gradient_checkpointing": False},
    }
    groups = [[[32, 32], [24, 20, 16, 8]]] * 2
    cases = {
        name: {
            "settings": {part: given.get(part, {}) | sections.get(part, {}) for part in given | sections},
            "groups": groups,
        }
        for name, sections in CASES.items()
    }
    command = [sys.executable, "-m", "tests.integration.host_syncs", json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_host_waits_at_these_places_alone(case: str, found: dict[str, Any]):
    assert found[case]["step"] == dict.fromkeys(ONCE_PER_STEP, 1)
    of_ours = {place: n for place, n in found[case]["micro-batches"].items() if place not in in_transformers()}
    assert of_ours == dict(zip(AFTER_ALL_MICRO_BATCHES, (NUM_PASSES.get(case, 1), 1), strict=True))


def test_cases_are_what_they_are_called(found: dict[str, Any]):
    forwards = {
        case: {name: found[case]["counters"].get(name, 0) for name in ("vision_forwards", "shared_forwards")}
        for case in CASES
    }
    assert forwards == {
        "trained tower": {"vision_forwards": 2, "shared_forwards": 2},
        "frozen tower and reference": {"vision_forwards": 2, "shared_forwards": 4},
        "cut groups": {"vision_forwards": 4, "shared_forwards": 5},
        "dense rows": {"vision_forwards": 4, "shared_forwards": 0},
        "off policy, high entropies": {"vision_forwards": 4, "shared_forwards": 4},
    }


def test_every_stated_place_is_still_found(found: dict[str, Any]):
    """A place that transformers or this project has mended leaves the list."""
    assert in_transformers() <= {place for case in found.values() for place in case["micro-batches"]}


def in_transformers() -> set[str]:
    return {f"{caller} > {place}" for caller, places in IN_TRANSFORMERS.items() for place in places}
