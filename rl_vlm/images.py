"""Images as RGB pixels, from files that nobody has vouched for."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from rl_vlm.errors import DataError

if TYPE_CHECKING:
    from rl_vlm.config.schema import DataConfig

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
SENT_FORMATS = ("PNG", "JPEG", "WEBP")
"""Those that go to servers as they are; images in others are sent as PNG."""


def read_image(value: Any, folder: Path, max_pixels: int, where: str) -> tuple[Image.Image, bytes | None]:
    """The first frame of an image, upright (EXIF) and in RGB, as `Image.convert` makes it: transparency is dropped.

    With it come the encoded bytes where a server that decodes them has the same pixels, else None.

    `value` is a PIL image, encoded bytes, a path (relative to `folder`), or a dict of `bytes` and `path`. The size in
    the header is held against `max_pixels` before a pixel is decoded. Raises DataError, which opens with `where`.
    """
    try:
        encoded = None if isinstance(value, Image.Image) else _encoded(value, folder)
        image = value if encoded is None else Image.open(BytesIO(encoded), formats=FORMATS)
        _check_header(image, max_pixels)
        pixels = ImageOps.exif_transpose(image).convert("RGB")
        return pixels, encoded if _is_sent_as_it_is(image) else None
    except UnidentifiedImageError as error:
        raise DataError(f"{where}{_label(value)}: not an image in one of the formats {', '.join(FORMATS)}.") from error
    except Exception as error:  # a damaged file can make a decoder raise anything
        raise DataError(f"{where}{_label(value)}: the image cannot be read: {error}") from error


def png_bytes(image: Image.Image) -> bytes:
    """The image as a PNG, which keeps every pixel."""
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def media_type(encoded: bytes) -> str:
    """That of an encoded image, such as `image/jpeg`."""
    return Image.MIME[str(Image.open(BytesIO(encoded), formats=FORMATS).format)]


def pixel_limits(data: DataConfig) -> dict[str, int]:
    """The limits on an image's pixels that are set, by the names that processors have for them."""
    limits = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
    return {name: value for name, value in limits.items() if value is not None}


def _encoded(value: Any, folder: Path) -> bytes:
    if isinstance(value, dict):
        value = value["path"] if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str | Path):
        raise TypeError(f"found a {type(value).__name__}, expected a PIL image, a path, bytes, or a dict of both.")
    if "://" in str(value):
        raise ValueError("URLs are not fetched; download the file and give its path.")
    return (folder / value).read_bytes()


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
    """Whether its file leaves nothing to convert, to turn or to choose, which a server may do in another way."""
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    is_animated = getattr(image, "is_animated", False)
    return image.format in SENT_FORMATS and image.mode == "RGB" and orientation == 1 and not is_animated


def _label(value: Any) -> str:
    """The path of an image, if it has one, for a message."""
    path = value.get("path") if isinstance(value, dict) else value
    return f", {path}" if isinstance(path, str | Path) else ""
