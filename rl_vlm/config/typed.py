"""Whether a value has a type, for settings whose types do not stand in the schema."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError


def why_not(value: Any, wanted: Any) -> str | None:
    """Return why a value does not have a type, without any conversion but that of int to float; None if it has."""
    try:
        TypeAdapter(wanted).validate_python(value, strict=True)
    except ValidationError as error:
        reasons = dict.fromkeys(detail["msg"] for detail in error.errors())
        return " or ".join(reasons).replace("Input should be", "it should be")
    return None
