import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.algorithm.losses import LossInputs, per_budget, per_completion, per_token
from rl_vlm.algorithm.objective import configured_loss
from rl_vlm.algorithm.own_loss import check_own_loss, load_loss
from rl_vlm.config.schema import AlgorithmConfig
from rl_vlm.errors import ConfigError

HEAD = "import torch\n\n\ndef loss(ratio_NK, inputs, algorithm):\n"
GOOD = "    return -ratio_NK * inputs.advantages_NK, {'mine/ratio': ratio_NK}\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write a token loss to a file, and return the settings that name it."""

    def write(body: str, head: str = HEAD, name: str = "loss", **settings: Any) -> AlgorithmConfig:
        path = tmp_path / "my.py"
        path.write_text(head + body)
        return AlgorithmConfig(loss_type=f"{path}:{name}", **settings)

    return write


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_loss_that_can_be_used(write, level, beta):
    check_own_loss(write(GOOD, importance_sampling_level=level, beta=beta))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["clipped_loss", "cispo_loss", "sapo_loss"])
def test_built_in_losses_pass_by_their_own_names(name, level):
    algorithm = AlgorithmConfig(loss_type=f"rl_vlm.algorithm.losses:{name}", importance_sampling_level=level)
    check_own_loss(algorithm)
    assert configured_loss(algorithm)[0] is load_loss(f"rl_vlm.algorithm.losses:{name}")


def test_built_in_loss_types_are_not_loaded():
    check_own_loss(AlgorithmConfig(loss_type="dapo"))


@pytest.mark.parametrize(
    ("weights", "expected"), [("token", per_token), ("completion", per_completion), ("budget", per_budget)]
)
def test_loss_weights_choose_the_average(write, weights, expected):
    loss, found = configured_loss(write(GOOD, loss_weights=weights))
    assert (loss.__name__, found) == ("loss", expected)


def test_an_instance_or_a_class_with_a_call_is_a_loss(write):
    head = "class Loss:\n    def __call__(self, ratio_NK, inputs, algorithm):\n    "
    check_own_loss(write(GOOD, head, "Loss"))


REFUSED = {
    "return -ratio_NK * inputs.advantages_NK": "returned a tensor of shape (2, 3); it must return (loss_NK, metrics)",
    "return None": "returned a NoneType; it must return",
    "return ratio_NK, {}, 1": "returned a tuple of 3; it must return",
    "return ratio_NK.mean(), {}": "a tensor of shape () as a loss; 2 completions need the shape (2, 3) or (2, 1)",
    "return ratio_NK[0], {}": "returned a tensor of shape (3,) as a loss",
    "return ratio_NK.T, {}": "returned a tensor of shape (3, 2) as a loss",
    "return 0.5, {}": "returned a float as a loss",
    "return ratio_NK / 0, {}": "returned a loss that is not finite",
    "return ratio_NK * float('nan'), {}": "returned a loss that is not finite",
    "return ratio_NK.detach(), {}": "returned a loss without a gradient",
    "return ratio_NK.long(), {}": "returned a loss of torch.int64",
    "return (ratio_NK - ratio_NK.detach()).sqrt(), {}": "returned a loss whose gradient is not finite",
    "return ratio_NK, [ratio_NK]": "returned a list of 1 as metrics",
    "return ratio_NK, {'mine': 1.0}": "returned a float as the metric 'mine'",
    "return ratio_NK, {'mine': ratio_NK / 0}": "returned the metric 'mine' that is not finite",
    "return ratio_NK, {'entropy': ratio_NK}": "returned the metric entropy, which the run writes itself",
    "return ratio_NK, {'rewards/x/mean': ratio_NK}": "returned the metric rewards/x/mean, which the run writes itself",
    "return ratio_NK * algorithm.epsilon_high, {}": "raised TypeError: ",
    "return ratio_NK - inputs.old_logprobs_NT, {}": "in the first update of a window, without old log-probs",
    "return ratio_NK if inputs.old_logprobs_NT is None else ratio_NK / 0, {}": "not finite, on made-up completions",
}
"""Bodies of a loss, and what is said of each."""


@pytest.mark.parametrize(("body", "message"), REFUSED.items())
def test_a_result_that_a_run_cannot_use_is_refused(write, body, message):
    algorithm = write(f"    {body}\n")
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        check_own_loss(algorithm)
    assert str(error.value).startswith(f"algorithm.loss_type {algorithm.loss_type!r} ")


def test_a_loss_without_a_gradient_leaves_the_kl_term(write):
    check_own_loss(write("    return ratio_NK.detach(), {}\n", beta=0.1))


def test_metrics_of_built_in_losses_may_be_used(write):
    check_own_loss(write("    return ratio_NK, {'clip_ratio/mine': ratio_NK > 1, 'cispo_clip_ratio': ratio_NK > 1}\n"))


@pytest.mark.parametrize("head", ["def loss(ratio, inputs):\n", "def loss(a, b, c, d):\n", "def loss(*, a, b, c):\n"])
def test_another_signature_is_refused(write, head):
    algorithm = write("    return 1\n", head)
    with pytest.raises(ConfigError, match=re.escape("cannot be called as f(ratio_NK, inputs, algorithm): ")):
        check_own_loss(algorithm)


def test_names_that_do_not_exist_are_refused(write, tmp_path):
    algorithm = write(GOOD, name="lose")
    with pytest.raises(ConfigError, match=r"my.py has no function 'lose' \(did you mean 'loss'\?\)"):
        check_own_loss(algorithm)
    for name, message in {
        f"{tmp_path}/none.py:loss": "there is no file .*none.py",
        "no_such_module:loss": "the module 'no_such_module' cannot be imported",
    }.items():
        with pytest.raises(ConfigError, match=f"algorithm.loss_type '{name}': {message}"):
            check_own_loss(AlgorithmConfig(loss_type=name))


def test_the_check_draws_no_random_numbers(write):
    algorithm = write("    return ratio_NK * torch.rand(1), {}\n")
    state = torch.get_rng_state()
    check_own_loss(algorithm)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_the_function_is_given(write):
    """Which inputs are there, by update and by `beta`."""
    seen: list[LossInputs] = []
    body = "    SEEN.append(inputs)\n" + GOOD
    algorithm = write(body, HEAD.replace("import torch", "import torch\n\nSEEN = []"), beta=0.1)
    seen = load_loss(algorithm.loss_type).__globals__["SEEN"]
    check_own_loss(algorithm)
    assert [inputs.old_logprobs_NT is None for inputs in seen] == [True, False]
    assert all(inputs.ref_logprobs_NT is not None and inputs.advantages_NK.shape == (2, 1) for inputs in seen)


def test_a_loss_that_cannot_have_an_advantage_per_token_is_refused_with_advantages_of_turns(write):
    body = "    return -ratio_NK * inputs.advantages_NK.squeeze(1)[:, None], {}\n"
    check_own_loss(write(body))
    with pytest.raises(ConfigError, match="on made-up completions"):
        check_own_loss(write(body, turn_advantages="return"))
