"""Find rows with the same prompt and the same images, whatever the names of the image files.

Rows with equal messages and equally many images and pixels are candidates. Only their images are read and hashed
(BLAKE2b, 128 bits):

by default        the encoded bytes of an image, or the pixels of a PIL image
with `decode`     the pixels of every image, upright and in RGB, so that PNG and BMP files of one image are equal
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import Any

from PIL.Image import Image

from rl_vlm.config.data_names import num_draws
from rl_vlm.data.check import NUM_THREADS, bad_row
from rl_vlm.data.images import image_content, open_image, read_image
from rl_vlm.data.samples import Rows
from rl_vlm.data.video.read import video_digest
from rl_vlm.data.video.source import ClipHeader
from rl_vlm.errors import DataError, Finding
from rl_vlm.reward.golds import gold_columns
from rl_vlm.tools.checks.diagnosis import Checking, Note
from rl_vlm.tools.checks.rows import RowFacts, Split, about_row, every_row
from rl_vlm.tools.checks.settings import rewards
from rl_vlm.tools.checks.table import Subject

DUPLICATE = "Leave out one of them: it counts twice."
CONTRADICTION = "Leave out the wrong one: a completion that one row rewards is wrong for the other."
HELD_OUT = "Leave the row out of the training data: otherwise held-out scores include a trained row."
ONE_PICTURE = "Look at the column of images: rows about different things have different pictures."
NUM_DRAWN = 64
FEWEST = 3
"""Minimum number of rows with images for a common picture to be a finding."""


def duplicates(subject: Subject) -> Checking[None]:
    """Find rows that occur twice, and pictures that are in most rows."""
    splits = subject.value(every_row)
    if splits is None or not splits.loaded:
        return
    columns = list(dict.fromkeys(chain(*(split.rows.columns for split in splits.loaded))))
    golds = gold_columns(columns, subject.value(rewards) or [])
    has_environment = subject.config.rollout.environment is not None
    yield from find_duplicates(splits.loaded, golds, subject.decode, has_environment)
    has_videos = any(fact.note.headers for split in splits.loaded for fact in split.facts)
    media = "images and bytes of videos" if has_videos else "images"
    yield Note(f"duplicates by prompt and {'pixels' if subject.decode else 'encoded bytes'} of {media}")
    for split in splits.loaded:
        yield from find_common_picture(split)


def find_duplicates(
    splits: Sequence[Split], golds: Sequence[str], decode: bool, has_environment: bool = False
) -> Iterator[Finding]:
    """Yield a finding for each row that repeats an earlier row of its split, and for each training row held out too.

    The first split is the training data. `golds` are the columns of gold answers. With `decode`, also report candidates
    whose image is damaged after its header. An environment makes its task from all columns, so they must be equal too.
    """
    by_content: dict[tuple[bytes, ...], list[RowFacts]] = defaultdict(list)
    findings = []
    for fact, content in contents(candidates(splits), decode):
        if isinstance(content, DataError):
            findings.append(replace(bad_row(fact.rows, fact.row, content), severity="error"))
        else:
            by_content[fact.text, *content].append(fact)
    for facts in by_content.values():
        for alike in by_task(facts) if has_environment else [facts]:
            findings += repeats(splits, golds, alike)
    yield from sorted(findings, key=lambda finding: (finding.data or "", finding.row or 0))


def by_task(facts: Sequence[RowFacts]) -> list[list[RowFacts]]:
    """Return lists of rows with equal columns but the id. Rows without content have no equal: their seeds differ."""
    alike: dict[str, list[RowFacts]] = defaultdict(list)
    for fact in facts:
        if num_draws(fact.rows.part(fact.row).name) is None:
            columns = fact.rows.parse(fact.row).columns
            alike[repr({name: value for name, value in columns.items() if name != "id"})].append(fact)
    return list(alike.values())


def find_common_picture(split: Split) -> Iterator[Finding]:
    """Yield a finding if one picture is in more than half of the rows. Images are compared by their bytes.

    First compare up to `NUM_DRAWN` random rows. Read all images only if a quarter of these rows share a picture.
    """
    facts = [fact for fact in split.facts if fact.is_usable and fact.num_media]
    if len(facts) < FEWEST:
        return
    drawn = random.Random(0).sample(facts, min(NUM_DRAWN, len(facts)))
    if len(with_common_picture(drawn)) * 4 < len(drawn):
        return
    name, rows = split.rows.name, with_common_picture(facts)
    if len(rows) * 2 > len(split.usable):
        what = f"{name}: the picture of row {rows[0]} is in {len(rows)} of {len(split.usable)} rows"
        yield Finding("warning", "one picture in most rows", what, ONE_PICTURE, name)


def with_common_picture(facts: Sequence[RowFacts]) -> list[int]:
    """Return the rows that have the most common picture."""
    places: dict[bytes, list[int]] = defaultdict(list)
    for fact, content in contents(facts, decode=False):
        for digest in set() if isinstance(content, DataError) else set(content):
            places[digest].append(fact.row)
    return max(places.values(), key=len, default=[])


def candidates(splits: Sequence[Split]) -> list[RowFacts]:
    """Return the rows whose messages and numbers of media and pixels equal another row's."""
    alike: dict[tuple[bytes, int, int, tuple[ClipHeader, ...]], list[RowFacts]] = defaultdict(list)
    for fact in chain(*(split.facts for split in splits)):
        if fact.is_usable:
            alike[fact.text, fact.num_media, fact.note.num_pixels, fact.note.headers].append(fact)
    return [fact for facts in alike.values() if len(facts) > 1 for fact in facts]


def contents(facts: Sequence[RowFacts], decode: bool) -> Iterator[tuple[RowFacts, tuple[bytes, ...] | DataError]]:
    """Yield rows with the digests of images and videos, or with the DataError if one cannot be read."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        yield from zip(facts, pool.map(partial(digests_of, decode), facts), strict=True)


def digests_of(decode: bool, fact: RowFacts) -> tuple[bytes, ...] | DataError:
    """Return a digest of each image and video of a row, or the DataError if one cannot be read."""
    rows, row, where = fact.rows, fact.row, fact.rows.place(fact.row)
    try:
        parsed, folder = rows.parse(row), rows.part(row).video_folder
        images = [image_digest(rows, row, value, f"{where}, column {name}", decode) for name, value in parsed.images]
        return (*images, *(video_digest(value, folder, f"{where}, column {name}") for name, value in parsed.videos))
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


def repeats(splits: Sequence[Split], golds: Sequence[str], facts: Sequence[RowFacts]) -> Iterator[Finding]:
    """Yield the findings about rows with the same content, which are in order."""
    of_split = [[fact.row for fact in facts if fact.rows.source is split.rows.source] for split in splits]
    for split, mine in zip(splits, of_split, strict=True):
        for row in mine[1:]:
            yield duplicate(split.rows, golds, mine[0], row)
    for held_out in of_split[1][:1] if len(splits) > 1 else ():
        what = f": {splits[1].rows.place(held_out)} has the same prompt and images"
        for row in of_split[0]:
            yield about_row(splits[0].rows, row, "row that is held out too", what, HELD_OUT)


def duplicate(rows: Rows, golds: Sequence[str], first: int, row: int) -> Finding:
    """Build the finding about a row that repeats an earlier one."""
    one, other = ([repr(rows.parse(index).columns.get(name)) for name in golds] for index in (first, row))
    what = f": {rows.place(first)} has the same prompt and images"
    if one == other:
        return about_row(rows, row, "duplicate", what, DUPLICATE)
    what = f"{what}, and other values in {', '.join(golds)}"
    return about_row(rows, row, "duplicate with another gold answer", what, CONTRADICTION)
