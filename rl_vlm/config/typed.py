"""Check the type of a value, for settings whose types are not in the schema."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError


def why_not(value: Any, wanted: Any) -> str | None:
    """Return why a value does not have the type `wanted`, or None if it has. Only int is converted, to float."""
    try:
        TypeAdapter(wanted).validate_python(value, strict=True)
    except ValidationError as error:
        reasons = dict.fromkeys(detail["msg"] for detail in error.errors())
        return " or ".join(reasons).replace("Input should be", "it should be")
    return None
