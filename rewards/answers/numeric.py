"""Reward for an answer that is the right number."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rewards.contract import Fault, Score
from rewards.text import Completion, answer_text, completion_text, gold_text

LONGEST_NUMBER = 100

# Digits are spelled [0-9]: \d and float() accept those of every script. A word that scales the number is not a unit.
QUANTITY = re.compile(
    r"""(?P<sign>[-+]?) (?P<currency>[$€£¥]?)
    (?: (?:(?P<whole>[0-9]+)\ )? (?P<numerator>[0-9]+)/(?P<denominator>[0-9]+)
      | (?P<decimal>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)? | [0-9]+(?:\.[0-9]*)? | \.[0-9]+)
        (?:(?:[eE]|\ ?[x×*]\ ?10\^)(?P<exponent>[-+]?[0-9]+))?
    )
    (?:\ ?(?!(?:hundred|thousand|million|billion|trillion|dozen|bn|[kKMBxe])s?(?![A-Za-z]))
      (?P<unit>% | °[CF]? | [A-Za-zµΩ]+(?:/[A-Za-z]+)?(?:\^?[23]|[²³])?))?""",
    re.VERBOSE,
)


class Quantity(NamedTuple):
    value: float
    unit: str
    """As written; empty if there is none."""


def numeric(
    completions: Sequence[Completion], solution: Sequence[Any], *, rel_tol: float = 1e-9, abs_tol: float = 0.0
) -> list[Score]:
    """Return 1.0 if the answer is the number `solution` within tolerance, else 0.0; None if `solution` is no number.

    Tolerances are those of `math.isclose`. Units must agree if both sides have one; `50%` equals both 0.5 and 50.
    """
    return [
        _is_number(completion_text(completion), gold_text(gold), rel_tol, abs_tol)
        for completion, gold in zip(completions, solution, strict=True)
    ]


def _is_number(text: str, gold: str | Fault | None, rel_tol: float, abs_tol: float) -> Score:
    if not isinstance(gold, str):
        return gold
    expected, answer = parse_quantity(gold), parse_quantity(text)
    return None if expected is None else float(answer is not None and _equal(answer, expected, rel_tol, abs_tol))


def parse_quantity(text: str) -> Quantity | None:
    """Parse a number such as `-1,234.5`, `3/4`, `1 1/2`, `50%`, `1e-3`, `2 x 10^5`, `$7` or `7 km/h`; else return None.

    Only the number may stand in the last closed `<answer>` tag, or in the whole text if there is none.
    """
    written = answer_text(text).strip("*` ").rstrip(".").replace("−", "-")
    match = QUANTITY.fullmatch(written) if len(written) <= LONGEST_NUMBER else None
    if match is None:
        return None
    if match["denominator"]:
        if int(match["denominator"]) == 0:
            return None
        value = int(match["whole"] or 0) + int(match["numerator"]) / int(match["denominator"])
    else:
        value = float(f"{match['decimal'].replace(',', '')}e{match['exponent'] or 0}")
    unit = "%" if match["unit"] == "percent" else match["currency"] or match["unit"] or ""
    return Quantity(-value if match["sign"] == "-" else value, unit) if math.isfinite(value) else None


def _equal(answer: Quantity, gold: Quantity, rel_tol: float, abs_tol: float) -> bool:
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    readings = [answer.value]
    if answer.unit != gold.unit and "%" in (answer.unit, gold.unit):
        readings.append(answer.value / 100 if answer.unit == "%" else answer.value * 100)
    return any(math.isclose(reading, gold.value, rel_tol=rel_tol, abs_tol=abs_tol) for reading in readings)
