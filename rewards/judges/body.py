"""Reads bodies of HTTP replies piece by piece, up to a bound."""

from __future__ import annotations

import zlib

import httpx

LARGEST_BODY = 8 * 2**20
"""Maximum bytes of a reply, both as they arrive and decompressed. A chat completion has thousands."""

ACCEPTED = {"Accept-Encoding": "gzip"}
"""Request headers, so that `read_body` can read the reply."""

GZIP = 16 + zlib.MAX_WBITS


class BodyError(Exception):
    """Raised if a reply is too large or cannot be decompressed. The message continues "The server answers with"."""


async def read_body(response: httpx.Response) -> bytes:
    """Return the body of a streamed reply, decompressed. Raises BodyError if it is too large or damaged.

    httpx would decompress each arriving piece as a whole, and a piece of 64 KiB may hold 64 MiB.
    """
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise BodyError(f"the encoding {encoding!r}, which was not asked for")
    gzip = zlib.decompressobj(GZIP) if encoding == "gzip" else None
    body, num_arrived = bytearray(), 0
    async for piece in response.aiter_raw():
        num_arrived += len(piece)
        try:
            body += gzip.decompress(piece, LARGEST_BODY + 1 - len(body)) if gzip else piece
        except zlib.error:
            raise BodyError("damaged gzip") from None
        if max(num_arrived, len(body)) > LARGEST_BODY:
            raise BodyError(f"more than {LARGEST_BODY // 2**20} MiB")
    return bytes(body)
