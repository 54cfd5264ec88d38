"""The score in a judge's reply."""

from __future__ import annotations

import re

from rewards.contract import Fault

NUMBER = r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?"
JSON_SCORE = re.compile(rf'"score"\s{{0,9}}:\s{{0,9}}({NUMBER})\s{{0,9}}[,}}]')
OUT_OF = re.compile(rf"(?<![\w./])({NUMBER})(?:\s?/\s?|\s{{1,9}}out\s{{1,9}}of\s{{1,9}})({NUMBER})(?![\w/])")
LONE = re.compile(rf"(?<![\w.])({NUMBER})(?!\w|\.[0-9])")

LONGEST_SHOWN = 80


def read_reply(reply: str, scale: float) -> float | Fault:
    """Return the score in a reply, divided by `scale`, or a fault if there is none between 0 and `scale`.

    Only the text after the last `</think>` counts. The score is the number at the last `"score"` of JSON. Without JSON,
    it is the only number of the last line, or the x of its `x/scale` or `x out of scale`. A reply with both has no
    score.
    """
    reply = reply.rpartition("</think>")[2]
    if (start := reply.rfind('"score"')) >= 0:
        match = JSON_SCORE.match(reply, start)
        scores = [match[1], *_last_number(reply[match.end() :], scale)] if match else []
    else:
        scores = _numbers(reply.strip().rpartition("\n")[2], scale)
    if len(scores) != 1:
        problem = 'no {"score": x}, nor one number in its last line'
        return Fault("reply", f"the judge's reply has {problem}: {_end(reply)}")
    score = float(scores[0])
    if not 0 <= score <= scale:
        return Fault("reply", f"the judge's score {score:g} is not between 0 and scale={scale:g}: {_end(reply)}")
    return score / scale


def _last_number(rest: str, scale: float) -> list[str]:
    """Return the number in the last line, if it has exactly one and is below the JSON."""
    line = rest.strip().rpartition("\n")[2] if "\n" in rest else ""
    numbers = _numbers(line, scale)
    return numbers if len(numbers) == 1 else []


def _numbers(line: str, scale: float) -> list[str]:
    """Return the numbers in a line. `x/scale` and `x out of scale` count as one number."""
    line = OUT_OF.sub(lambda match: match[1] if float(match[2]) == scale else match[0], line)
    return LONE.findall(line)


def _end(reply: str) -> str:
    return repr(reply if len(reply) <= LONGEST_SHOWN else "…" + reply[-LONGEST_SHOWN:])
