"""`report.html`: one file with everything, which opens offline."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from rl_vlm.config import yaml_text
from rl_vlm.config.schema import RunConfig
from rl_vlm.config.secrets import without_secrets
from rl_vlm.errors import shorten, text_of
from rl_vlm.log.directory import REPORT
from rl_vlm.log.files import output
from rl_vlm.log.terminal import is_first_process
from rl_vlm.model.policy import Policy
from rl_vlm.run.instrument import Instrument
from rl_vlm.tools.report.curves import charts_of
from rl_vlm.tools.report.diversity import MOST_LISTED, diversity_of
from rl_vlm.tools.report.draw import chart_data, clock_of, figure_of, number
from rl_vlm.tools.report.read import RunResults, holds_results, place_of, read_runs
from rl_vlm.tools.report.rollouts import MOST_ROLLOUTS, browser_data, faulty_rows
from rl_vlm.tools.report.turns import reward_by_turns
from rl_vlm.tools.report.verdict import RunRow, columns_of, fault_counts, verdict_of

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent
SCRIPTS = ("page.js", "charts.js", "rollouts.js")
NUMBER = re.compile(r"\d+")
MOST_REASONS = 30
"""Largest number of listed reasons for left-out rows."""
SHORTEST_PAUSE = 60.0
"""Least seconds between two reports of a run."""
MOST_TIME = 0.02
"""Largest share of a run's time that its reports take."""
PATIENCE = 3600
"""A page stops reloading after this many seconds without a new page: a longer step is rarer than a dead run."""


class LiveReport(Instrument):
    """Rewrites the report of a run from time to time. A failure is logged once and never ends the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.level = logging.WARNING
        self.next = 0.0

    def attach(self, policy: Policy) -> None:
        self.next = time.monotonic() + SHORTEST_PAUSE / 4

    def after_step(self, is_last: bool) -> None:
        self.refresh()

    def end(self) -> None:
        self.refresh(is_last=True)

    def refresh(self, is_last: bool = False) -> None:
        """Write the report if it is due. After a build of t seconds, pause for 50 t, but at least a minute."""
        start = time.monotonic()
        if not is_last and start < self.next:
            return
        if not write_folder_report(self.folder, self.level, reloads=not is_last):
            self.level = logging.DEBUG
        end = time.monotonic()
        self.next = end + max(SHORTEST_PAUSE, (end - start) / MOST_TIME)


def write_folder_report(folder: Path, level: int = logging.WARNING, reloads: bool = False) -> bool:
    """Write the report of a run or an evaluation into its folder. If that fails, log it at `level` and return False."""
    try:
        write_report([folder], folder / REPORT, reloads)
    except Exception as error:
        logger.log(level, "the report was not written: %s; `rl-vlm report %s` tries again", text_of(error), folder)
        return False
    return True


@contextmanager
def evaluation_report(config: RunConfig) -> Iterator[None]:
    """Write the report of the evaluation that the block runs in `train.output_dir`, even if its scoring failed.

    The first process writes it, if `log.report` is set.
    """
    folder = Path(config.train.output_dir).absolute() / "evaluation"  # a function may change the working directory
    try:
        yield
    finally:
        if config.log.report and is_first_process() and holds_results(folder):
            write_folder_report(folder)


def write_report(folders: Sequence[Path], path: Path, reloads: bool = False, most: int = MOST_ROLLOUTS) -> None:
    """Write the report of one run or evaluation, or the comparison of several. It shows `most` completions.

    With `reloads`, the page reloads itself every minute. Only a run may set this: when it ends, it writes the page
    without reloading. Raises ConfigError if a folder holds neither, or if the file cannot be written.
    """
    write_page(build_page(read_runs(folders), reloads, most), path)


def write_page(page: str, path: Path) -> None:
    """Write a page. Raises ConfigError if the file cannot be written."""
    with output(path, "the report") as file:
        file.write_bytes(page.encode("utf-8", "replace"))


def report_path(folders: Sequence[Path]) -> Path:
    """Return the path of the report. A single one lies in its folder, a comparison of several in the present folder."""
    return place_of(folders[0]) / REPORT if len(folders) == 1 else Path(REPORT)


def build_page(runs: Sequence[RunResults], reloads: bool = False, most: int = MOST_ROLLOUTS) -> str:
    """Build the HTML page."""
    script = "\n".join((SOURCE / name).read_text() for name in SCRIPTS)
    charts, verdicts = charts_of(runs), [verdict_of(run) for run in runs]
    columns = columns_of(verdicts)
    data = browser_data(runs, most) | {
        "charts": [chart_data(chart, len(runs)) for chart in (*charts.first, *charts.internals)],
        "clocks": [clock_of(run.lines) for run in runs],
    }
    return template("page.html.jinja").render(
        runs=runs,
        title=" · ".join(run.name for run in runs),
        built=now(),
        reloads=round(SHORTEST_PAUSE) if reloads else None,
        patience=PATIENCE,
        verdicts=verdicts,
        rows=[RunRow(judged, [judged.by_label.get(name) for name in columns]) for judged in verdicts],
        columns=columns,
        first=list(map(figure_of, charts.first)),
        internals=list(map(figure_of, charts.internals)),
        constant=[(title, number(value)) for title, value in charts.constant],
        data=script_json(data),
        notes=[(run.name, note) for run in runs for note in run.notes],
        diversities=[diversity_of(run, function) for run in runs if run.rows for function in run.decisive],
        by_turns=[(run.name, found) for run in runs if (found := reward_by_turns(run))],
        resampled=[run.name for run in runs if run.settings.get("rollout", {}).get("max_resampling_rounds")],
        most_listed=MOST_LISTED,
        counted=[(run.name, counts) for run in runs if (counts := fault_counts(run))],
        faulty=faulty_rows(runs),
        dropped=[(run.name, reasons(run.dropped)) for run in runs if run.dropped],
        settings=[(run, without_secrets(yaml_text.dump(run.settings))) for run in runs],
        without_secrets=without_secrets,
        different=different_settings(runs),
        style=(SOURCE / "page.css").read_text(),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


@cache
def template(name: str) -> Any:
    """Return a template of a page, which escapes all text. A run writes many pages, so it is compiled once."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        loader=FileSystemLoader(SOURCE),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def script_json(value: Any) -> Any:
    """Return JSON that cannot close the script element around it."""
    from jinja2.utils import htmlsafe_json_dumps

    return htmlsafe_json_dumps(value, dumps=partial(json.dumps, ensure_ascii=False, separators=(",", ":")))


def reasons(dropped: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, list[str]]]:
    """Count left-out rows by reason, and name the first rows of each reason.

    Reasons that differ only in numbers are one. The rarest reasons share one entry.
    """
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in dropped:
        rows.setdefault(NUMBER.sub("#", str(row.get("reason", ""))), []).append(row)
    ordered = sorted(rows.values(), key=len, reverse=True)
    entries = [
        (shorten(some[0].get("reason", ""), 200), len(some), [str(row.get("sample_id", "")) for row in some[:3]])
        for some in ordered[:MOST_REASONS]
    ]
    rarer = ordered[MOST_REASONS:]
    return [*entries, (f"{len(rarer)} other reasons", sum(map(len, rarer)), [])] if rarer else entries


def different_settings(runs: Sequence[RunResults]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between runs, with each run's value. All directories of runs differ."""
    names = dict.fromkeys(
        (section, leaf)
        for run in runs
        for section, leaves in run.settings.items()
        for leaf in leaves
        if (section, leaf) != ("train", "output_dir")
    )
    rows = [
        (f"{section}.{leaf}", [json.dumps(run.settings.get(section, {}).get(leaf)) for run in runs])
        for section, leaf in names
    ]
    return [(name, list(map(without_secrets, values))) for name, values in rows if len(set(values)) > 1]
