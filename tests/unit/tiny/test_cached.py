from pathlib import Path
from types import ModuleType

import pytest

from rl_vlm.tiny import cached
from rl_vlm.tiny.cached import MakeModel, cached_model


@pytest.fixture
def made() -> list[int]:
    """Seeds of the models that were made."""
    return []


@pytest.fixture
def make(made, tmp_path, monkeypatch) -> MakeModel:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def starting_model(directory: Path, seed: int) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "weights").write_text(f"of seed {seed}")
        made.append(seed)

    return starting_model


def written(directory: Path) -> str:
    return (directory / "weights").read_text()


def test_a_model_is_made_once_for_each_seed(make, made, tmp_path):
    for i, seed in enumerate([0, 0, 1, 0]):
        cached_model()(make)(tmp_path / str(i), seed)
        assert written(tmp_path / str(i)) == f"of seed {seed}"
    assert made == [0, 1]
    (tmp_path / "0" / "weights").write_text("changed")
    cached_model()(make)(tmp_path / "another", 0)
    assert written(tmp_path / "another") == "of seed 0"


def test_it_is_made_again_if_a_file_or_a_version_changes(make, made, tmp_path, monkeypatch):
    module = ModuleType("scenes")
    module.__file__ = str(tmp_path / "scenes.py")
    Path(module.__file__).write_text("SIDES = 1")
    cached_model(module)(make)(tmp_path / "first", 0)
    Path(module.__file__).write_text("SIDES = 2")
    cached_model(module)(make)(tmp_path / "second", 0)
    monkeypatch.setattr(cached, "version", lambda name: "another")
    cached_model(module)(make)(tmp_path / "third", 0)
    assert len(made) == 3


def test_a_model_that_fails_is_not_kept(make, made, tmp_path):
    def fails(directory: Path, seed: int) -> None:
        make(directory, seed)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached_model()(fails)(tmp_path / "first", 0)
    assert list((tmp_path / "cache" / "rl_vlm" / "models").iterdir()) == []


def test_a_file_in_place_of_the_cache_is_no_error(make, made, tmp_path):
    (tmp_path / "cache").write_text("")
    cached_model()(make)(tmp_path / "model", 0)
    assert (made, written(tmp_path / "model")) == ([0], "of seed 0")
