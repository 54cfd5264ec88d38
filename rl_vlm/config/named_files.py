"""Files of this machine that settings name: data, models, and the files of functions and classes."""

from __future__ import annotations

from pathlib import Path

from rl_vlm.config.data_names import is_file
from rl_vlm.config.function_names import is_live_name
from rl_vlm.config.function_source import INSTALLED, module_file

SYSTEMS = ("gymnasium", "openenv", "skyrl", "vagen", "verl")
"""Prefixes of the names of other systems' environments and tools. See `rollout/environments/adapters.py`."""


def local_file(name: str) -> Path | None:
    """Return the file or directory that a setting names, whether it exists or not. Return None for other names.

    For `file.py:function` and `module:function` return the file, also after the prefix of another system. Installed
    packages do not count.
    """
    if is_live_name(name):
        return None
    prefix, _, rest = name.partition(":")
    source, colon, attribute = (rest if prefix in SYSTEMS else name).rpartition(":")
    if not colon and prefix == "vagen":  # module.Class
        source = attribute.rpartition(".")[0]
    if source.endswith(".py"):
        return Path(source).expanduser()
    if (module := own_module(source)) is not None:
        return module
    path = Path(name).expanduser()
    is_path = path.exists() or is_file(name) or name.startswith((".", "/", "~"))
    return path if is_path and "://" not in name else None


def own_module(name: str) -> Path | None:
    """Return the file of a module below the working directory, relative to it. Return None for other modules."""
    found = module_file(name, Path.cwd())
    if found is None or not found.resolve().is_relative_to(Path.cwd()):
        return None
    relative = found.resolve().relative_to(Path.cwd())
    return relative if INSTALLED.isdisjoint(relative.parts) else None
