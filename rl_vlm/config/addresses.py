"""Addresses of servers in settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from rl_vlm.config.secrets import without_secrets


def why_no_address(url: str) -> str | None:
    """Return why a URL cannot be the address of a server, or None if it can."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"it is no address: {error}"
    if parts.scheme not in ("http", "https"):
        return "an address must begin with http:// or https://"
    if not parts.hostname or port == 0:
        return "it has no host" if not parts.hostname else "port 0 is no port"
    if "@" in parts.netloc:
        return "leave the login before @ out: requests are sent without it, and it would be in every log"
    return None


def wrong_addresses(urls: Iterable[str]) -> list[dict[str, Any]]:
    """Return the URLs that cannot be addresses, without secrets, and the reasons."""
    return [{"url": without_secrets(url), "why": why} for url in urls if (why := why_no_address(url))]
