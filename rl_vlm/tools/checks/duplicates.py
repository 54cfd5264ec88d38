"""Find rows with the same prompt and the same images, whatever the names of the image files.

Rows with equal messages and equally many images and pixels are candidates. Only their images are read and hashed
(BLAKE2b, 128 bits):

by default        the encoded bytes of an image, or the pixels of a PIL image
with `decode`     the pixels of every image, upright and in RGB, so that PNG and BMP files of one image are equal
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Any

from PIL.Image import Image

from rl_vlm.data.check import NUM_THREADS
from rl_vlm.data.images import image_content, open_image, read_image
from rl_vlm.data.samples import Rows, image_values
from rl_vlm.errors import DataError, Finding
from rl_vlm.tools.checks.rows import RowFacts, Split

Place = tuple[int, int]
"""Number of a split, and row in it."""
DUPLICATE = "Leave out one of them: it counts twice."
CONTRADICTION = "Leave out the wrong one: a completion that one row rewards is wrong for the other."
HELD_OUT = "Leave the row out of the training data: the held-out scores count what was trained on."
ONE_PICTURE = "Look at the column of images: rows about different things have different pictures."
NUM_DRAWN = 64
FEWEST = 3
"""Minimum number of rows with images for a common picture to be a finding."""


def find_duplicates(splits: Sequence[Split], golds: Sequence[str], decode: bool) -> list[Finding]:
    """Return a finding for each row that repeats an earlier row of its split, and for each training row held out too.

    The first split is the training data. `golds` are the columns of gold answers. With `decode`, also report candidates
    whose image is damaged after its header.
    """
    candidates, findings = candidate_places(splits), []
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        digests = pool.map(partial(content_of, splits, decode), candidates)
        by_content: dict[tuple[bytes, ...], list[Place]] = defaultdict(list)
        for (number, fact), content in zip(candidates, digests, strict=True):
            if isinstance(content, DataError):
                name = splits[number].rows.name
                kind, remedy = content.problem
                findings.append(Finding("error", kind, str(content), remedy, name, fact.row))
            else:
                by_content[fact.text, *content].append((number, fact.row))
    for places in by_content.values():
        findings += repeats(splits, golds, places)
    return sorted(findings, key=lambda finding: (finding.data or "", finding.row or 0))


def find_common_picture(split: Split) -> list[Finding]:
    """Return a finding if one picture is in more than half of the rows. Images are compared by their bytes.

    First compare up to `NUM_DRAWN` random rows. Read all images only if a quarter of these rows share a picture.
    """
    facts = [(0, fact) for fact in split.facts if fact.is_usable and fact.num_images]
    if len(facts) < FEWEST:
        return []
    drawn = random.Random(0).sample(facts, min(NUM_DRAWN, len(facts)))
    _, count = most_common(split, drawn)
    if count * 4 < len(drawn):
        return []
    rows, (row, count) = split.rows, most_common(split, facts)
    if count * 2 <= len(split.usable):
        return []
    what = f"{rows.name}: the picture of row {row} is in {count} of {len(split.usable)} rows"
    return [Finding("warning", "one picture in most rows", what, ONE_PICTURE, rows.name)]


def most_common(split: Split, facts: Sequence[tuple[int, RowFacts]]) -> tuple[int, int]:
    """Return the first row with the most common picture, and the number of rows that have it."""
    places: dict[bytes, list[int]] = defaultdict(list)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        digests = pool.map(partial(content_of, [split], False), facts)
        for (_, fact), content in zip(facts, digests, strict=True):
            for digest in set() if isinstance(content, DataError) else set(content):
                places[digest].append(fact.row)
    rows = max(places.values(), key=len, default=[0])
    return rows[0], len(rows)


def candidate_places(splits: Sequence[Split]) -> list[tuple[int, RowFacts]]:
    """Return the rows, with their split, whose messages and numbers of images and pixels equal another row's."""
    alike: dict[tuple[bytes, int, int], list[tuple[int, RowFacts]]] = defaultdict(list)
    for number, split in enumerate(splits):
        for fact in split.facts:
            if fact.is_usable:
                alike[fact.text, fact.num_images, fact.note.num_pixels].append((number, fact))
    return [place for places in alike.values() if len(places) > 1 for place in places]


def content_of(splits: Sequence[Split], decode: bool, candidate: tuple[int, RowFacts]) -> tuple[bytes, ...] | DataError:
    """Return a digest of each image of a row, or the DataError if one cannot be read."""
    number, fact = candidate
    rows = splits[number].rows
    where = rows.place(fact.row)
    if not fact.num_images:
        return ()
    try:
        images = image_values(rows.source[fact.row], where)
        return tuple(image_digest(rows, fact.row, value, f"{where}, column {name}", decode) for name, value in images)
    except DataError as error:
        return error


def image_digest(rows: Rows, row: int, value: Any, where: str, decode: bool) -> bytes:
    """Hash the encoded bytes of an image. For a PIL image, or with `decode`, hash its size and pixels."""
    content, folder = image_content(value), rows.part(row).image_folder
    if decode or isinstance(content, Image):
        image, _ = read_image(content, folder, rows.config.max_image_pixels, where)
        return blake2b(repr(image.size).encode() + image.tobytes(), digest_size=16).digest()
    with open_image(content, folder) as file:
        return blake2b(file.read(), digest_size=16).digest()


def repeats(splits: Sequence[Split], golds: Sequence[str], places: Sequence[Place]) -> list[Finding]:
    """Build the findings about `places`, the rows with the same content in order."""
    findings = []
    for number in range(len(splits)):
        mine = [row for split, row in places if split == number]
        findings += [duplicate(splits[number].rows, golds, mine[0], row) for row in mine[1:]]
    trained = [row for split, row in places if split == 0]
    held_out = [row for split, row in places if split == 1]
    if held_out:
        rows, other = splits[0].rows, splits[1].rows.place(held_out[0])
        for row in trained:
            what = f"{rows.place(row)}: {other} has the same prompt and images"
            findings.append(Finding("warning", "row that is held out too", what, HELD_OUT, rows.name, row))
    return findings


def duplicate(rows: Rows, golds: Sequence[str], first: int, row: int) -> Finding:
    """Build the finding about a row that repeats an earlier one."""
    one, other = ([repr(rows.parse(index).columns.get(name)) for name in golds] for index in (first, row))
    what = f"{rows.place(row)}: {rows.place(first)} has the same prompt and images"
    if one == other:
        return Finding("warning", "duplicate", what, DUPLICATE, rows.name, row)
    what = f"{what}, and other values in {', '.join(golds)}"
    return Finding("warning", "duplicate with another gold answer", what, CONTRADICTION, rows.name, row)
