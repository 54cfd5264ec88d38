"""Reward for an answer that is the right number."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

from rewards.contract import Fault, Score
from rewards.text import TextOrMessages, answer_text, gold_text, score_golds

LONGEST_NUMBER = 100
NEEDS_PINT = "pip install -e '.[rewards]', or set convert_units to false"

# Digits are spelled [0-9]: \d and float() accept digits of every script. A word that scales the number is not a unit.
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

SIGN_INSIDE = re.compile(r"^([$€£¥])([-+])")


class Quantity(NamedTuple):
    value: float
    unit: str
    """The unit as written, or "" if there is none."""


def numeric(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    *,
    rel_tol: float = 1e-9,
    abs_tol: float = 0.0,
    convert_units: bool = True,
) -> list[Score]:
    """Return 1.0 if the answer is the number `solution` within tolerance, else 0.0; None if `solution` has no digit.

    A solution that has digits and is not one number is a fault. Tolerances work as in `math.isclose`, in the unit of
    `solution`. If both sides have a unit, the answer is converted to the unit of `solution`. If `convert_units` is
    False, both units must be equal. `50%` equals both 0.5 and 50. Raises ValueError if a tolerance is invalid.
    """
    for name, tolerance in (("rel_tol", rel_tol), ("abs_tol", abs_tol)):
        if not 0 <= tolerance < math.inf:
            raise ValueError(f"`{name}` is {tolerance}; a tolerance is a finite number of 0 or more")

    def score(text: str, gold: str) -> Score:
        expected = _gold_quantity(gold)
        if not isinstance(expected, Quantity):
            return expected
        if convert_units and is_physical(expected.unit) and not _has_pint():
            return Fault("load", f"`solution` has a unit, {expected.unit!r}: {NEEDS_PINT}")
        answer = parse_quantity(text)
        return float(answer is not None and _equal(answer, expected, rel_tol, abs_tol, convert_units))

    return score_golds(completions, map(gold_text, solution), score)


def _gold_quantity(gold: str) -> Quantity | Fault | None:
    """Parse a solution. Return None if it has no digit, or a fault if it has digits and is not one number."""
    expected = parse_quantity(gold)
    if expected is None and any(map(str.isdigit, gold)):
        return Fault("type", f"`solution` is {gold[:60]!r}, which cannot be read as one number")
    return expected


def parse_quantity(text: str) -> Quantity | None:
    """Parse a number such as `-1,234.5`, `3/4`, `1 1/2`, `50%`, `1e-3`, `2 x 10^5`, `$7` or `7 km/h`; else return None.

    The last closed `<answer>` tag, or the whole text if there is none, must contain only the number. If it contains
    `####`, only the text after the last one counts.
    """
    answer = answer_text(text).rpartition("####")[2]
    written = answer.strip("*` \n").rstrip(".").replace("−", "-").replace("–", "-")
    written = SIGN_INSIDE.sub(r"\2\1", written)
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


def _equal(answer: Quantity, gold: Quantity, rel_tol: float, abs_tol: float, convert_units: bool) -> bool:
    readings = [answer.value]
    if answer.unit and gold.unit and answer.unit != gold.unit:
        readings = [converted(answer, gold.unit)] if convert_units else []
    elif answer.unit != gold.unit and "%" in (answer.unit, gold.unit):
        readings.append(answer.value / 100 if answer.unit == "%" else answer.value * 100)
    return any(
        reading is not None and math.isclose(reading, gold.value, rel_tol=rel_tol, abs_tol=abs_tol)
        for reading in readings
    )


def converted(quantity: Quantity, unit: str) -> float | None:
    """Convert a quantity to another unit with pint and return its value, or None if this is not possible."""
    import pint

    if not (is_physical(quantity.unit) and is_physical(unit)):
        return None
    try:
        value = _units().convert(Fraction(quantity.value), _pint_unit(quantity.unit), _pint_unit(unit))
        return float(value) if math.isfinite(value) else None
    except (pint.PintError, ArithmeticError, AssertionError, TypeError, ValueError):
        return None


def is_physical(unit: str) -> bool:
    """Return whether pint may know a unit: it is neither a currency nor percent."""
    return unit != "" and unit[0] not in "%$€£¥"


@functools.lru_cache(1000)
def _pint_unit(unit: str) -> Any:
    """Convert a unit in the form of `QUANTITY`, such as `km/h` or `cm3`, to pint's unit."""
    return _units().parse_units(re.sub(r"\^?([23])$", r"**\1", unit))


@functools.cache
def _units() -> Any:
    """Return pint's unit registry. It computes with fractions, so that 32 °F is exactly 0 °C."""
    import pint

    return pint.UnitRegistry(non_int_type=cast(Any, Fraction))


@functools.cache
def _has_pint() -> bool:
    return find_spec("pint") is not None
