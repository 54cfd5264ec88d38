"""Reading images from untrusted files as RGB pixels."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from rl_vlm.errors import DataError

if TYPE_CHECKING:
    from rl_vlm.config.schema import DataConfig
    from rl_vlm.types import Sample

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
SENT_FORMATS = ("PNG", "JPEG", "WEBP")
"""Formats that are sent to servers unchanged; images in other formats are sent as PNG."""


def read_image(value: Any, folder: Path, max_pixels: int, where: str) -> tuple[Image.Image, bytes | None]:
    """Read the first frame of an image, upright (EXIF) and in RGB by `Image.convert`, which drops transparency.

    Also returns the encoded bytes if a server that decodes them gets the same pixels, else None.

    `value` is a PIL image, encoded bytes, a path (relative to `folder`), or a dict of `bytes` and `path`. The size in
    the header is checked against `max_pixels` before decoding. Raises DataError, whose message begins with `where`.
    """
    try:
        encoded = None if isinstance(value, Image.Image) else encoded_image(value, folder)
        image = value if encoded is None else Image.open(BytesIO(encoded), formats=FORMATS)
        _check_header(image, max_pixels)
        pixels = ImageOps.exif_transpose(image).convert("RGB")
        return pixels, encoded if _is_sent_as_it_is(image) else None
    except UnidentifiedImageError as error:
        raise DataError(f"{where}{_label(value)}: not an image in one of the formats {', '.join(FORMATS)}.") from error
    except Exception as error:  # a damaged file can make a decoder raise anything
        raise DataError(f"{where}{_label(value)}: the image cannot be read: {error}") from error


def image_path(value: Any) -> str | Path | None:
    """Return the path of an image value, or None if the value holds the image itself."""
    if isinstance(value, dict) and value.get("bytes") is None:
        value = value.get("path")
    return value if isinstance(value, str | Path) else None


def encoded_image(value: Any, folder: Path) -> bytes:
    """Return the bytes of an image's file, or of a PNG of its pixels if it is a PIL image.

    `value` is a PIL image, encoded bytes, a path (relative to `folder`), or a dict of `bytes` and `path`. Raises
    TypeError for anything else, ValueError for a URL, OSError for a file that cannot be read.
    """
    path = image_path(value)
    if path is not None and "://" in str(path):
        raise ValueError("URLs are not fetched; download the file and give its path.")
    if path is not None:
        return (folder / path).read_bytes()
    if isinstance(value, dict):
        value = value["bytes"]
    if isinstance(value, Image.Image):
        return png_bytes(value)
    if not isinstance(value, bytes):
        raise TypeError(f"found a {type(value).__name__}, expected a PIL image, a path, bytes, or a dict of both.")
    return value


def png_bytes(image: Image.Image) -> bytes:
    """Encode the image as PNG, which is lossless."""
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def image_urls(sample: Sample) -> list[str]:
    """Return the sample's images as data URLs: each row's own file if servers read it alike, else a PNG."""
    files = [sample.encoded_images.get(i) or png_bytes(image) for i, image in enumerate(sample.images)]
    return [f"data:{media_type(file)};base64,{base64.b64encode(file).decode()}" for file in files]


def media_type(encoded: bytes) -> str:
    """Return the media type of an encoded image, such as `image/jpeg`."""
    return Image.MIME[str(Image.open(BytesIO(encoded), formats=FORMATS).format)]


def pixel_limits(data: DataConfig) -> dict[str, int]:
    """Return the limits on an image's pixels that are set, by the names that processors use."""
    limits = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
    return {name: value for name, value in limits.items() if value is not None}


def _check_header(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise ValueError(
            f"{width} × {height} = {width * height} pixels are more than data.max_image_pixels = {max_pixels}. "
            "Shrink the file, or raise that limit."
        )
    if image.mode.startswith(("I", "F")):
        raise ValueError(
            f"mode {image.mode} has more than 8 bits a channel, which RGB would clip to white or black. "
            "Scale it to 8 bits first."
        )


def _is_sent_as_it_is(image: Image.Image) -> bool:
    """Return whether the file can be sent unchanged.

    It must need no conversion, rotation or choice of a frame, which a server may do differently.
    """
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    is_animated = getattr(image, "is_animated", False)
    return image.format in SENT_FORMATS and image.mode == "RGB" and orientation == 1 and not is_animated


def _label(value: Any) -> str:
    """Return the path of an image, if it has one, for an error message."""
    path = value.get("path") if isinstance(value, dict) else value
    return f", {path}" if isinstance(path, str | Path) else ""
