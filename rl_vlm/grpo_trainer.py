"""Training from Python, with functions and data in memory: `GRPOTrainer`, named after TRL's.

It builds the settings of a run and calls `run/` and `evaluation/`. Settings name objects in memory (`functions.py`).
"""

from __future__ import annotations

import html
import io
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from rl_vlm.config.elsewhere import instead_of
from rl_vlm.config.function_names import PREFIX, live_name
from rl_vlm.config.load import config_from
from rl_vlm.config.schema import DataSource, RunConfig
from rl_vlm.config.trl_objects import HUB, hub_fields, is_trl_object, lora_settings, without_hub
from rl_vlm.config.trl_refused import NOT_CALLED
from rl_vlm.config.trl_trainer import reason_without
from rl_vlm.data.fingerprint import contents
from rl_vlm.data.sources import as_table
from rl_vlm.distributed.launcher import check_numbers, is_one_of_several
from rl_vlm.distributed.signals import handled, stop
from rl_vlm.errors import ConfigError, DataError, RLVLMError, Stopped, listed, text_of
from rl_vlm.functions import Function, content_of, label_of, live
from rl_vlm.log.terminal import is_first_process, shown_log
from rl_vlm.passes.allocator import allocator_configured
from rl_vlm.tools.export.push import hub_target

if TYPE_CHECKING:
    from rl_vlm.run.instrument import MakeInstrument

logger = logging.getLogger(__name__)

Summary = dict[str, Any]

RUNNING = threading.Lock()
"""Held while a trainer runs, since working directory, process group and `LIVE` belong to the whole process."""


class GRPOTrainer:
    """A training run, as in TRL.

    trainer = GRPOTrainer("Qwen/Qwen2.5-VL-3B-Instruct", reward_funcs=my_function, train_dataset=dataset,
                          output_dir="runs/mine", learning_rate=1e-5)
    summary = trainer.train()
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        callbacks: Iterable[Any] | None = None,
        peft_config: Any = None,
        tools: Any = None,
        environment_factory: Any = None,
        **settings: Any,
    ) -> None:
        """Resolve the settings. Nothing is loaded or written before `train` or `evaluate`.

        `model` is a hub name, a directory, a model of transformers in memory, or a function that writes a checkpoint,
        called as `f(directory, seed)`. `processing_class` is a processor in memory, in place of the checkpoint's.
        `reward_funcs` is a function, a name, a dict such as `{"function": f, "weight": 0.5}`, or a list of these.
        `train_dataset` and `eval_dataset` are a `datasets.Dataset`, dicts (copied), or a value of `dataset_name`.
        `args` is a YAML file, a dict with its content, or TRL's GRPOConfig. Without sections, it has TRL's defaults.
        `peft_config` is a LoraConfig of PEFT. `callbacks` are given to `add_callback`.
        `tools` are functions or their names. `environment_factory` is a class, another callable that makes an
        environment, a name, or a dict of these by the names that rows have in their column `environment`.
        `settings` override `args` by name, as on the command line. `loss_type` can be a function, too.

        Raises ConfigError for settings that cannot be used or have no effect, and DataError for data without rows.
        """
        refuse_overrides(type(self))
        check_numbers()
        self.objects: dict[str, Function] = {}
        """Objects that the settings name, by name."""
        given = {
            "reward_funcs": self._rewards(reward_funcs),
            "model.model_name_or_path": self._model(model, processing_class),
            "data.dataset_name": self._rows("train_dataset", train_dataset),
            "data.eval_dataset_name": self._rows("eval_dataset", eval_dataset),
            "rollout.tools": self._tools(tools),
            "rollout.environment": self._environment(environment_factory),
        }
        arguments = {name: value for name, value in given.items() if value is not None} | adapter_settings(peft_config)
        if twice := arguments.keys() & settings.keys():
            raise ConfigError(f"`{min(twice)}` is given in args and as an argument of GRPOTrainer; leave one out")
        for name in {"loss_type", "algorithm.loss_type"} & settings.keys():
            if callable(loss := settings[name]):
                settings[name] = self._named(loss, label_of(loss))
        self.hub = hub_target(hub_fields(args, settings))
        keywords = {k: v for k, v in settings.items() if k not in HUB and (v is not None or not instead_of(k))}
        self.config: RunConfig = config_from(without_hub(args), keywords | arguments)
        check_workers(self.config, self.objects)
        if hasattr(model, "state_dict"):
            keep_both(model, self.config)
        self.callbacks: list[Any] = []
        """Callbacks of transformers, in the order of their calls."""
        self._trl_args = args if is_trl_object(args) else None
        for callback in callbacks or ():
            self.add_callback(callback)
        self.checkpoint: str | None = None
        """The newest checkpoint that the last `train` call wrote or resumed."""

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> Summary:
        """Train, and return the content of `summary.json`, which prints as a table. The settings apply to every call.

        `resume_from_checkpoint`: True resumes the newest checkpoint of `output_dir`, if there is one. A path resumes
        the checkpoint there, False resumes none, and None uses the setting. If training fails or is interrupted,
        `checkpoint` is the newest complete one. Raises RLVLMError for errors that a user can fix. Ctrl-C and SIGTERM
        in the main thread save the last complete step, and then raise KeyboardInterrupt, or SystemExit with status 143.
        """
        config = self.config
        if resume_from_checkpoint is not None:
            resumed = "auto" if resume_from_checkpoint is True else str(resume_from_checkpoint or "") or None
            section = config.train.model_copy(update={"resume_from_checkpoint": resumed})
            config = config.model_copy(update={"train": section})
        self.checkpoint = None
        with self._prepared():
            from rl_vlm.run.outcome import RunSummary
            from rl_vlm.run.run import train
            from rl_vlm.tools.instruments import INSTRUMENTS

            earlier = [] if config.train.resume_from_checkpoint else self._complete_checkpoints()
            try:
                summary = RunSummary(train(config, [*INSTRUMENTS, *self._callers()]))
            except BaseException:
                written = [path for path in self._complete_checkpoints() if path not in earlier]
                self.checkpoint = str(written[-1][0]) if written else None
                raise
        self.checkpoint = summary["checkpoint"]
        if self.hub.push_to_hub:
            try:
                self.push_to_hub()
            except RLVLMError as error:  # the run is complete all the same
                logger.error("%s", error)
        return summary

    def evaluate(self, checkpoint: Any = None) -> Summary:
        """Evaluate on `eval_dataset`, and return the content of `evaluation/summary.json`.

        `checkpoint` is a path or a hub name. The default is the newest checkpoint of the last `train` call, or else the
        model that training starts from. Raises RLVLMError for errors that a user can fix.
        """
        if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
            raise ConfigError(
                f"evaluate() takes the path of a checkpoint, found a {type(checkpoint).__name__}: held-out rows are "
                "the argument eval_dataset of GRPOTrainer"
            )
        evaluated = checkpoint or self.checkpoint or self.config.model.model_name_or_path
        with self._prepared():
            from rl_vlm.evaluation.run import compare_checkpoints
            from rl_vlm.tools.report.build import evaluation_report

            with evaluation_report(self.config):
                (summary,) = compare_checkpoints(self.config, [str(evaluated)]).values()
        return summary

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> str | None:
        """Export the model of the last `train` call, upload it to the hub, and return the address.

        The repository is `hub_model_id`, or else has the name of `output_dir`. Of several processes, the first one
        uploads, and the others return None. The call always waits. Arguments for TRL's model card have no effect, and
        the log names them. Raises RLVLMError for errors that a user can fix.
        """
        given = {"hub_token": token, "hub_revision": revision}
        target = replace(self.hub, **{name: value for name, value in given.items() if value is not None})
        directory = self.save_model()
        if not is_first_process():
            return None
        with self._log():
            if unused := listed([*card, *([] if blocking else ["blocking"])]):
                logger.warning("push_to_hub ignores %s: it waits, and the card is that of the export", unused)
            address = target.push(directory, Path(self.config.train.output_dir).absolute().name, commit_message)
            logger.info("the model is on %s", address)
        return address

    def add_callback(self, callback: Any) -> None:
        """Add a TrainerCallback of transformers, or a class of one, for later calls of `train`.

        Its `on_train_begin`, `on_log`, `on_step_end`, `on_evaluate`, `on_save` and `on_train_end` are called, and
        `should_training_stop` of the control is honoured. Raises ConfigError if it is something else.
        """
        from rl_vlm.tools.callbacks import usable_callback

        self.callbacks.append(usable_callback(callback))

    def _callers(self) -> list[MakeInstrument]:
        """Return the makers of the instrument that calls the callbacks: one, or none without callbacks."""
        from rl_vlm.tools.callbacks import Callbacks

        return [partial(Callbacks, self.callbacks, self._trl_args)] if self.callbacks else []

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> Path:
        """Export the model of the last `train` call like `rl-vlm export`, and return the directory.

        `output_dir` is a directory that is absent, empty or an earlier export. The default, and the place of a model
        that is to be saved in the run's own directory, is `export` in that directory. A LoRA run has an adapter. Of
        several processes, the first one writes. Raises RLVLMError for errors that a user can fix.
        """
        run = Path(self.config.train.output_dir).absolute()
        given = run if output_dir is None else Path(output_dir).absolute()
        directory = run / "export" if given == run else given
        if self.checkpoint is None:
            raise ConfigError("there is no model to save: call train() first")
        if is_first_process():
            from rl_vlm.tools.export.write import export

            with self._log():
                _, directory = export(Path(self.checkpoint), to=directory)
                logger.info("the model of %s is in %s, beside a model card", self.checkpoint, directory)
        return directory

    def __repr__(self) -> str:
        """Return a line for each main setting, for a notebook."""
        config, data = self.config, self.config.data
        model = config.model.model_name_or_path
        rows = {
            "model": f"{model} with LoRA of rank {config.model.lora_r}" if config.model.use_peft else model,
            "reward functions": ", ".join(spec.name or spec.function for spec in config.rewards.specs) or "none",
            "training data": ", ".join(entry.name for entry in data.entries("train")) or "none",
            "held-out data": ", ".join(entry.name for entry in data.entries("eval")) or "none",
            "run directory": config.train.output_dir,
            "newest checkpoint": self.checkpoint or "none",
        }
        width = max(map(len, rows))
        return "\n".join([type(self).__name__, *(f"  {label.ljust(width)}  {row}" for label, row in rows.items())])

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError. For an attribute of TRL's trainer, name the replacement."""
        reason = reason_without(name)
        raise AttributeError(f"{type(self).__name__} has no `{name}`" + (f": {reason}" if reason else ""))

    @property
    def report(self) -> Path:
        """Return the path of the run's report, which `train` writes."""
        return Path(self.config.train.output_dir) / "report.html"

    def show_report(self, height: int = 700) -> Any:
        """Return the report: in a notebook as a frame of `height` pixels, elsewhere as a path.

        If the run has no report, return the evaluation's. Raises ConfigError if there is no report yet.
        """
        reports = [
            path for path in (self.report, self.report.parent / "evaluation" / self.report.name) if path.is_file()
        ]
        if not reports:
            raise ConfigError(
                f"there is no report in {self.report.parent}: train() writes one unless the setting `report` is False, "
                "and evaluate() writes one of its own"
            )
        from rl_vlm.log.progress_bar import in_notebook

        if not in_notebook():
            return reports[0]
        from IPython.display import HTML

        page = html.escape(reports[0].read_text(encoding="utf-8"))
        return HTML(f'<div><iframe srcdoc="{page}" width="100%" height="{height}" frameborder="0"></iframe></div>')

    def _complete_checkpoints(self) -> list[tuple[Path, int]]:
        """Return the complete checkpoints of `output_dir` and their modification times, oldest step first."""
        from rl_vlm.checkpoint.store import complete

        return [(path, path.stat().st_mtime_ns) for path in complete(Path(self.config.train.output_dir))]

    def _log(self) -> AbstractContextManager[Any]:
        """Show the log in a block, unless the program handles it itself."""
        return nullcontext() if logging.getLogger("rl_vlm").hasHandlers() else shown_log()

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Prepare this process for a call: let settings name the objects, and show the log. Allow another call later.

        Raises ConfigError if another call runs, or if a worker process imports the script.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise ConfigError(
                "a worker process imports this script, which calls GRPOTrainer again: put the "
                'calls under `if __name__ == "__main__":`'
            )
        if not RUNNING.acquire(blocking=False):
            raise ConfigError("another GRPOTrainer runs in this process: wait for it, or start a process of its own")
        with ExitStack() as opened:
            opened.callback(RUNNING.release)
            opened.enter_context(self._log())
            opened.enter_context(allocator_configured(self.config))
            from rl_vlm.distributed.ranks import stay_joined

            for context in (live(self.objects), stay_joined(), handled(is_joining=is_one_of_several())):
                opened.enter_context(context)
            try:
                yield
            except (Stopped, KeyboardInterrupt) as stopped:
                if stop.signum == signal.SIGTERM:
                    raise SystemExit(stop.exit_status) from stopped
                raise KeyboardInterrupt from stopped

    def _model(self, model: Any, processor: Any) -> Any:
        """Return the model's name. Name it if it is a function or an object, or if its processor is an object."""
        if isinstance(model, type):
            raise ConfigError(f"model is the class {model.__name__}: give a hub name, a directory or a function")
        if processor is not None or hasattr(model, "state_dict"):
            from rl_vlm.model.in_memory import written_by

            held = written_by(model, processor)
            return self._named(held, label_of(processor if isinstance(model, str | os.PathLike) else model))
        return self._named(model, label_of(model)) if callable(model) else model

    def _rewards(self, rewards: Any) -> Any:
        """Convert these functions to a value of `rewards.reward_funcs`."""
        if isinstance(rewards, list | tuple):
            return [self._reward(reward) for reward in rewards]
        return rewards if rewards is None or isinstance(rewards, str) else [self._reward(rewards)]

    def _reward(self, reward: Any) -> Any:
        """Convert one reward to an entry of `rewards.reward_funcs`."""
        if isinstance(reward, Mapping):
            if callable(function := reward.get("function")):
                return {**reward, "function": self._named_reward(function, reward.get("name") or label_of(function))}
            return dict(reward)
        if hasattr(reward, "save_pretrained"):
            raise ConfigError(
                f"reward_funcs has a {type(reward).__name__}, which is no function: use the built-in function "
                "reward_model, which docs/built_in_rewards.md describes"
            )
        return self._named_reward(reward, label_of(reward)) if callable(reward) else reward

    def _tools(self, tools: Any) -> Any:
        """Convert functions to a value of `rollout.tools`."""
        if tools is None or isinstance(tools, str):
            return tools
        return [self._callable("tools", tool) for tool in ([tools] if callable(tools) else tools)]

    def _environment(self, factory: Any) -> Any:
        """Convert one factory, or several by name, to a value of `rollout.environment`."""
        if isinstance(factory, Mapping):
            return {name: self._callable("environment_factory", each) for name, each in factory.items()}
        return factory if factory is None else self._callable("environment_factory", factory)

    def _callable(self, argument: str, value: Any) -> str:
        """Name a callable. Return names unchanged, and raise ConfigError for anything else."""
        if isinstance(value, str):
            return value
        if not callable(value):
            raise ConfigError(f"{argument} has a {type(value).__name__}: give a callable, or its name")
        return self._named(value, label_of(value))

    def _rows(self, label: str, data: Any) -> Any:
        """Name rows in memory. Return other values of `dataset_name` unchanged."""
        if data is None or isinstance(data, str | os.PathLike):
            return data
        if isinstance(data, list) and data and all(map(names_data, data)):
            return data
        if isinstance(data, Mapping):
            raise ConfigError(f"{label} has several splits, {', '.join(map(str, data))}: give one of them")
        if isinstance(data, list):
            data = [dict(row) if isinstance(row, Mapping) else row for row in data]
        table = as_table(data, label)
        if not len(table):
            raise DataError(f"{label} has no rows")
        name = live_name(label, contents(table))
        self.objects[name] = lambda: data
        return name

    def _named_reward(self, function: Function, label: str) -> str:
        """Name a reward function. Raise ConfigError if another one has the same label."""
        if any(name.startswith(f"{PREFIX}{label}#") for name in self.objects):
            raise ConfigError(
                f"two reward functions are called {label}: give them names, as in "
                f'{{"function": {label}, "name": "first"}}'
            )
        return self._named(function, label)

    def _named(self, function: Function, label: str) -> str:
        """Name a callable, so that settings can refer to it."""
        name = live_name(label, content_of(function))
        self.objects[name] = function
        return name


def refuse_overrides(trainer: type) -> None:
    """Raise ConfigError if a subclass has methods of TRL's trainer that a run never calls."""
    own = [name for name in NOT_CALLED if getattr(trainer, name, None) != getattr(GRPOTrainer, name, None)]
    if own:
        raise ConfigError(
            f"{trainer.__name__} has {listed(own)}, which only TRL's trainer calls: rename methods that are not meant "
            "as overrides. docs/python.md#subclasses lists the replacements of overrides"
        )


def adapter_settings(peft_config: Any) -> dict[str, Any]:
    """Return the settings of a LoraConfig, and log the ones that differ here. None has no settings."""
    if peft_config is None:
        return {}
    settings, notes = lora_settings(peft_config)
    if notes and is_first_process():
        logger.warning("peft_config: %s", "; ".join(notes))
    return settings


def keep_both(model: Any, config: RunConfig) -> None:
    """Log that the caller's model keeps its memory. Raise ConfigError if host memory does not hold the run's, too.

    Each process of a machine loads the model: in float32, or the base of an adapter in the precision of `dtype`.
    """
    from rl_vlm.model.in_memory import refuse_second_copy

    is_frozen = config.model.use_peft and config.model.dtype == "bfloat16"
    refuse_second_copy(model, 2 if is_frozen else 4, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if is_first_process():
        directory = Path(config.train.output_dir) / "initial_model"
        logger.warning("the model in memory is written to %s, and the run loads it from there. Your object keeps its "
                       "memory until you delete it", directory)  # fmt: skip


def names_data(entry: Any) -> bool:
    """Return whether a list entry names data: a string, or a mapping as in a mixture. Otherwise it is a row."""
    return isinstance(entry, str) or (
        isinstance(entry, Mapping) and "name" in entry and set(entry) <= DataSource.model_fields.keys()
    )


def check_workers(config: RunConfig, objects: Mapping[str, Function]) -> None:
    """Raise ConfigError if a reward function in memory has a timeout and cannot be sent to a worker process."""
    for spec in config.rewards.specs:
        if not spec.timeout or spec.function not in objects:
            continue
        if problem := problem_of_pickling(objects[spec.function]):
            raise ConfigError(
                f"rewards.reward_funcs: {spec.function} has a timeout, so it runs in another process, but it cannot be "
                f"sent there: {problem}. Write it to a file and name `file.py:function`, or leave `timeout` "
                "out."
            )


def problem_of_pickling(function: Function) -> str | None:
    """Return why another process cannot load the function, or None if it can.

    Another process loads a script's functions by running the script again. A notebook has no script.
    """
    try:
        Sent(io.BytesIO()).dump(function)
    except Exception as error:
        return text_of(error)
    return None


class Sent(pickle.Pickler):
    """Pickles objects that another process can import."""

    def reducer_override(self, obj: Any) -> Any:
        """Raise PicklingError if a function or class is defined in a session without a file."""
        is_imported = isinstance(obj, type | FunctionType)
        if is_imported and obj.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            raise pickle.PicklingError(
                "it is defined in a notebook or an interactive session, which other processes cannot import"
            )
        return NotImplemented
