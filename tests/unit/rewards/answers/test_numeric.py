import pytest

from rewards.answers.numeric import numeric, parse_quantity
from rewards.contract import Fault
from tests.helpers.cpu_time import stays_within


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("7", 7.0, ""),
        ("7.", 7.0, ""),
        ("-7.5", -7.5, ""),
        ("−7", -7.0, ""),
        ("+.5", 0.5, ""),
        ("**7**", 7.0, ""),
        ("1,234,567.5", 1234567.5, ""),
        ("3/4", 0.75, ""),
        ("-3/4", -0.75, ""),
        ("1 1/2", 1.5, ""),
        ("-1 1/2", -1.5, ""),
        ("50%", 50.0, "%"),
        ("50 percent", 50.0, "%"),
        ("1e-3", 0.001, ""),
        ("1.5E3", 1500.0, ""),
        ("2 x 10^5", 200000.0, ""),
        ("2×10^-2", 0.02, ""),
        ("$1,200", 1200.0, "$"),
        ("-$7", -7.0, "$"),
        ("$-7", -7.0, "$"),
        ("€+7", 7.0, "€"),
        ("–7", -7.0, ""),
        ("2 x 10^–2", 0.02, ""),
        ("#### 72", 72.0, ""),
        ("48/2 = 24\n48+24 = 72\n#### 72", 72.0, ""),
        ("#### 7\n#### 1,234", 1234.0, ""),
        ("7 cm", 7.0, "cm"),
        ("7cm²", 7.0, "cm²"),
        ("7 m^2", 7.0, "m^2"),
        ("60 km/h", 60.0, "km/h"),
        ("20 °C", 20.0, "°C"),
        ("90°", 90.0, "°"),
        ("7 apples", 7.0, "apples"),
        ("<answer> 7 </answer>", 7.0, ""),
        ("<answer>1</answer> <answer>7</answer>", 7.0, ""),
    ],
)
def test_numbers(text, value, unit):
    assert parse_quantity(text) == (value, unit)


@pytest.mark.parametrize(
    "text",
    [
        "", "<answer></answer>", "seven", "nan", "inf", "-inf", "infinity", "1e999", "-1e999", "1e", "e5", "--7", ".",
        "1,23", "1,2345", "1,234,56", "1.2.3", "1_000", "0x10", "1/0", "3/4/5", "10-12", "10–12",
        "-$-7", "$--7", "72 ####", "#### 7 or 8", "#### 7 ####", "7 8", "1 2 3 4 5 6 7 8 9",
        "7 or 8", "6, 7", "7;8", "It is 7", "x = 7", "2+5", "2^3", "7x8", "7²", "7½", "½", "７", "٧", "7 thousand",
        "7 million", "7k", "7 K", "7M", "$7B", "3:4", "__import__('os').getcwd()", "(7).__class__", "True",
        "<answer>7", "9" * 1_000_000, "9" * 99 + "e" + "9" * 400,
    ],
)  # fmt: skip
def test_not_one_number(text):
    assert parse_quantity(text) is None


@pytest.mark.parametrize(
    ("text", "solution", "expected"),
    [
        ("7.0", "7", 1.0),
        ("7", 7, 1.0),
        ("7", 7.0, 1.0),
        ("0.75", "3/4", 1.0),
        ("1234", "1,234", 1.0),
        ("<answer>7</answer>", "<answer>7.00</answer>", 1.0),
        ("7.01", "7", 0.0),
        ("-7", "7", 0.0),
        ("70", "7", 0.0),
        ("0", "0", 1.0),
        ("1000001", "1000000", 0.0),
        ("7 cm", "7", 1.0),
        ("7", "7 cm", 1.0),
        ("7 cm", "7cm", 1.0),
        ("7 m", "7 cm", 0.0),
        ("$7", "€7", 0.0),
        ("50%", "50", 1.0),
        ("50%", "0.5", 1.0),
        ("50", "50%", 1.0),
        ("0.5", "50%", 1.0),
        ("50%", "50 percent", 1.0),
        ("0.5%", "50%", 0.0),
        ("5000%", "5000 cm", 0.0),
        ("", "7", 0.0),
        ("nan", "7", 0.0),
        ("1e999", "7", 0.0),
        ("7", None, None),
        ("7", "a dog", None),
        ("72", "48/2 = 24\n48+24 = 72\n#### 72", 1.0),
        ("24", "48/2 = 24\n48+24 = 72\n#### 72", 0.0),
        ("-5", "–5", 1.0),
        ("−5", "$-5", 1.0),
        ("nan", float("nan"), None),
        ("inf", float("inf"), None),
        ("1", True, None),
    ],
)
def test_scores(text, solution, expected):
    assert numeric([text], [solution]) == [expected]


@pytest.mark.parametrize(
    "gold", ["7 million", "1,00", "7 or 8", "1e999", "1/0", "７", "#### seven of 9", "Route 66", "7²"]
)
def test_a_gold_answer_with_digits_that_is_no_number_is_a_fault(gold):
    (score,) = numeric(["7"], [gold])
    assert isinstance(score, Fault) and score.kind == "type" and repr(gold) in score.message


def test_tolerances():
    assert numeric(["104", "106"], ["100", "100"], rel_tol=0.05) == [1.0, 0.0]
    assert numeric(["7.4", "7.6"], ["7", "7"], abs_tol=0.5) == [1.0, 0.0]


def test_conversational_completions():
    assert numeric([[{"role": "assistant", "content": "7.0"}]], ["7"]) == [1.0]


@pytest.mark.parametrize("text", ["1," * 300_000, " " * 300_000 + "x", "1 " * 40, "7" + "a" * 90 + "!"])
def test_long_outputs_take_no_time(text):
    assert numeric([text], ["7"]) == [0.0]
    assert stays_within(1.0, lambda: numeric([text], ["7"]))


# Definitions of the units: an inch is 2.54 cm, a litre 1,000 cm³, a mile 1,609.344 m, a kilowatt-hour 3.6 MJ.
@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("7 km", "7000 m"), ("7000 m", "7 km"), ("1 in", "2.54 cm"), ("1 L", "1000 cm3"), ("1 mile", "1609.344 m"),
        ("1 kWh", "3.6 MJ"), ("3.6 km/h", "1 m/s"), ("1 h", "60 min"), ("1 m²", "10000 cm^2"), ("180°", "180 deg"),
        ("32 °F", "0 °C"), ("0 °C", "32 °F"), ("-40 °C", "-40 degF"), ("1 kg", "1000 g"), ("0 m", "0 km"),
    ],
)  # fmt: skip
def test_units_are_converted(text, gold):
    assert numeric([text], [gold]) == [1.0]
    assert numeric([text], [gold], convert_units=False) == [0.0]


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("7 km", "7 m"), ("7 km", "7 kg"), ("5%", "5 km"), ("$5", "5 km"), ("5 km", "$5"), ("7 cats", "7 dogs"),
        ("7 lambda", "7 m"), ("7 import", "7 m"), ("7 __class__", "7 m"), ("7 m^9999999", "7 m"), ("7 m**9", "7 m"),
        ("5 dB", "5 dBm"), ("10 dB", "10 W"), ("1e308 km", "1e-3 m"), ("1e300 Ym", "7 ym"), ("7 m/m", "7 m"),
    ],
)  # fmt: skip
def test_units_that_cannot_be_converted_are_not_equal(text, gold):
    assert numeric([text], [gold]) == [0.0]


def test_the_tolerance_is_in_the_unit_of_the_solution():
    assert numeric(["7.001 km", "7.1 km"], ["7000 m"] * 2, abs_tol=2.0) == [1.0, 0.0]


def test_without_pint_a_solution_with_a_unit_is_a_fault(monkeypatch):
    monkeypatch.setattr("rewards.answers.numeric._has_pint", lambda: False)
    first, *others = numeric(["7 km"] * 4, ["7 km", "7", "50%", "$7"])
    assert isinstance(first, Fault) and first.kind == "load" and "-e '.[rewards]'" in first.message
    assert others == [1.0, 0.0, 0.0]
    assert numeric(["7 km", "7 m"], ["7 km"] * 2, convert_units=False) == [1.0, 0.0]
