import sys
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config.function_source import FunctionSource, read_source

LOSS = '''
import torch
from helpers import bounded
import limits as bounds
from rl_vlm.algorithm import losses


def loss(ratio, inputs, algorithm):
    """Reads `sapo_temperature_neg`, as a docstring may say."""
    low = shared(algorithm)
    return bounded(ratio, algorithm), bounds.upper(algorithm), low  # algorithm.delta


def shared(algorithm):
    return getattr(algorithm, "epsilon") + SCALE


def other(ratio, inputs, algorithm):
    return losses.sapo_loss(ratio, inputs, algorithm)


SCALE = 2.0
raise RuntimeError("the file is imported")
'''
HELPERS = "def bounded(ratio, algorithm):\n    return ratio * algorithm.beta\n"
LIMITS = "def upper(algorithm):\n    return algorithm.epsilon_high\n"
SETTINGS = {"epsilon", "epsilon_high", "delta", "beta", "sapo_temperature_neg", "sapo_temperature_pos"}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write files to the working directory, and return the source of `loss`."""
    monkeypatch.chdir(tmp_path)

    def write(name: str = "my.py:loss", **files: str) -> FunctionSource | None:
        for stem, text in ({"my": LOSS, "helpers": HELPERS, "limits": LIMITS} | files).items():
            Path(f"{stem}.py").write_text(text)
        return read_source(name)

    return write


@pytest.mark.parametrize("name", ["my.py:loss", "my:loss"])
def test_settings_are_read_by_the_function_and_by_what_it_calls_in_its_folder(name, write):
    source = write(name)
    assert source.attributes & SETTINGS == {"epsilon", "epsilon_high", "beta"}
    assert {"my", "helpers", "limits"}.isdisjoint(sys.modules)


def test_functions_of_this_package_are_followed(write):
    assert write("my.py:other").attributes & SETTINGS == {"sapo_temperature_neg", "sapo_temperature_pos"}
    clipped = read_source("rl_vlm.algorithm.losses:clipped_loss")
    assert clipped is not None and clipped.attributes & SETTINGS == {"epsilon", "epsilon_high", "delta"}


def test_a_source_that_is_not_there_is_none(write):
    assert write("my.py:nothing") is None
    for name in ("none.py:loss", "no_such_module:loss", "my.nothing:loss", "python:loss#0123456789ab", "dapo"):
        assert read_source(name) is None
    assert write(my="def loss(:") is None


@pytest.mark.parametrize(
    ("file", "old", "new", "is_same"),
    [
        ("my", "low = shared", "low  =  shared", True),
        ("my", "as a docstring may say", "as another may say", True),
        ("my", "# algorithm.delta", "", True),
        ("my", "algorithm):\n    return getattr", "algorithm: object) -> float:\n    return getattr", True),
        ("my", "losses.sapo_loss", "losses.cispo_loss", True),  # of another function
        ("my", "SCALE = 2.0", "SCALE = 3.0", False),
        ("my", "bounded(ratio, algorithm)", "bounded(2 * ratio, algorithm)", False),
        ("helpers", "ratio * ", "ratio + ", False),
        ("limits", "epsilon_high", "epsilon", False),
    ],
)
def test_the_digest_is_that_of_the_code_in_use(file, old, new, is_same, write):
    before = write()
    text = {"my": LOSS, "helpers": HELPERS, "limits": LIMITS}[file]
    assert old in text
    after = write(**{file: text.replace(old, new)})
    assert (after.digest == before.digest) == is_same


def test_a_module_of_a_package_is_found_without_its_import(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pack/inner").mkdir(parents=True)
    Path("pack/__init__.py").write_text("raise RuntimeError('the package is imported')\n")
    Path("pack/inner/__init__.py").write_text("")
    Path("pack/inner/mine.py").write_text("from ..common import part\n\n\ndef loss(a, b, c):\n    return part(c)\n")
    Path("pack/common.py").write_text("def part(algorithm):\n    return algorithm.delta\n")
    for place in ([], [str(tmp_path)]):
        monkeypatch.setattr(sys, "path", [*place, *sys.path])
        source = read_source("pack.inner.mine:loss")
        assert source is not None and "pack" not in sys.modules
        assert source.attributes == {"delta"}


def test_names_that_lead_back_to_themselves_end(write):
    source = write(my="from helpers import loss\n\n\ndef other():\n    loss()\n", helpers="from my import loss\n")
    assert source is None
    source = write(my="def loss(a, b, c):\n    return helper(c)\n\n\ndef helper(c):\n    return loss(c, c, c.delta)\n")
    assert source.attributes == {"delta"}


def test_packages_of_an_environment_in_the_folder_are_not_opened(write, tmp_path, monkeypatch):
    site = tmp_path / ".venv" / "site-packages"
    site.mkdir(parents=True)
    (site / "installed_here.py").write_text("def part(algorithm):\n    return algorithm.delta\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    head = "from installed_here import part\n\n\n"
    source = write(my=f"{head}def loss(a, b, algorithm):\n    return part(algorithm), algorithm.epsilon\n")
    assert source.attributes == {"epsilon"}


def test_functions_within_conditions_are_found(tmp_path):
    (tmp_path / "my.py").write_text(
        "try:\n    import fast\nexcept ImportError:\n    fast = None\nif fast is None:\n"
        "    def loss(a, b, algorithm):\n        return algorithm.epsilon\n"
    )
    source = read_source(f"{tmp_path}/my.py:loss")
    assert source is not None and source.attributes == {"epsilon"}


def test_methods_and_registered_names_are_found(tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text(
        "class Module:\n    @staticmethod\n    def f(completions): return LIMIT\nLIMIT = 1\n"
        "class Mine:\n    def __call__(self, completions): return OTHER\nOTHER = 1\norms['mine'] = Mine\n"
    )
    method, registered = read_source(f"{file}:Module.f"), read_source(f"{file}:mine")
    assert method is not None and registered is not None
    file.write_text(file.read_text().replace("LIMIT = 1", "LIMIT = 2"))
    assert read_source(f"{file}:Module.f") != method
    assert read_source(f"{file}:mine") == registered
    file.write_text(file.read_text().replace("OTHER = 1", "OTHER = 2"))
    assert read_source(f"{file}:mine") != registered


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return [c[0]['content'] for c in completions]", True),
        ("return [c if isinstance(c, str) else c[0]['content'] for p, c in zip(prompts, completions)]", True),
        ("for i, (c, p) in enumerate(zip(completions, prompts)):\n        c[0].get('content')", True),
        ("for i, c in enumerate(completions):\n        print(c[0])", True),
        ("return [completions[i][0]['content'] for i in range(9)]", True),
        ("return list(map(text_of, completions))", True),
        ("return [c[-1]['content'] for c in completions]", False),
        ("return [p[0]['content'] for p, c in zip(prompts, completions)]", False),
        ("return [p[0]['content'] for p in prompts] + [completions[0]]", False),
        ("return [c.split()[0] for c in completions]", False),
    ],
)
def test_a_function_that_reads_the_first_message_is_found(body, expected, write):
    helper = "def text_of(completion):\n    return completion[0]['content']\n\n\n"
    text = f"{helper}def loss(completions, prompts):\n    {body}\n"
    source = write(my=text)
    assert source is not None and source.reads_first_message is expected


def test_the_first_message_is_read_by_functions_of_trl():
    assert read_source("rl_vlm.algorithm.losses:clipped_loss").reads_first_message is False  # pyright: ignore
    source = read_source("trl.rewards:think_format_reward")
    assert source is not None and source.reads_first_message
