"""Parse JSON that a user has written. As in YAML, a key given twice is an error."""

import json
from typing import Any


def parse(text: str) -> Any:
    """Parse `text`. Raises ValueError if it is not valid or if an object has a key twice."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key `{next(key for key in keys if keys.count(key) > 1)}` is given twice")
    return found
