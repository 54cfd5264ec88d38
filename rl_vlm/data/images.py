"""Reading images from untrusted files as RGB pixels."""

from __future__ import annotations

import base64
import math
import re
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from rl_vlm.data.media import BASE64, AboveLimit, any_in, ends_like, media_errors

if TYPE_CHECKING:
    from rl_vlm.config.schema import DataConfig
    from rl_vlm.types import Sample

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
SENT_FORMATS = ("PNG", "JPEG", "WEBP")
"""Formats that are sent to servers unchanged. Images in other formats are sent as PNG."""
SUFFIX = re.compile(r"\.(png|jpe?g|jfif|webp|bmp|tiff?|gif)([?#]\S*)?\Z", re.IGNORECASE)
WHITESPACE = b" \t\r\n\f\v"
KEYS = ("image", "bytes", "path")
"""Keys for the image in a dict. The first one that is filled counts."""
SIZE_KEYS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys for the image's size in a dict. Qwen's utilities read them, this project does not."""
FILE_TYPES = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


class TooManyPixels(AboveLimit):
    """The image has more pixels than `data.max_image_pixels`."""


def read_image(value: Any, folder: Path, max_pixels: int, where: str) -> tuple[Image.Image, bytes | None]:
    """Read the first frame of an image, upright (EXIF) and in RGB by `Image.convert`, which drops transparency.

    Also return the encoded bytes if a server that decodes them gets the same pixels, else None.

    `value` is a PIL image, or any value that `open_image` takes. The size in the header is checked against `max_pixels`
    before decoding. Raises DataError with a message that begins with `where`.
    """
    with media_errors("image", value, where):
        value = image_content(value)
        encoded = None if isinstance(value, Image.Image) else encoded_image(value, folder)
        image = value if encoded is None else open_pillow(BytesIO(encoded))
        _check_header(image, max_pixels)
        pixels = ImageOps.exif_transpose(image).convert("RGB")
        return pixels, encoded if _is_sent_as_it_is(image) else None


def check_image(value: Any, folder: Path, max_pixels: int, where: str) -> int:
    """Read the number of pixels from an image's header.

    Raises the DataError of `read_image` if the image is missing or its header is bad. No pixel is decoded, so damage
    after the header is not found.
    """
    with media_errors("image", value, where):
        value = image_content(value)
        if isinstance(value, Image.Image):
            return _check_header(value, max_pixels)
        with open_image(value, folder) as file, open_pillow(file) as image:
            return _check_header(image, max_pixels)


def image_size(value: Any, folder: Path, where: str) -> tuple[int, int]:
    """Read width and height of the upright image (EXIF) from its header. Raises DataError if it cannot be read."""
    with media_errors("image", value, where):
        value = image_content(value)
        if isinstance(value, Image.Image):
            return upright_size(value)
        with open_image(value, folder) as file, open_pillow(file) as image:
            return upright_size(image)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height of an image after `ImageOps.exif_transpose`."""
    width, height = image.size
    is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    return (height, width) if is_turned else (width, height)


def image_content(value: Any) -> Any:
    """Return the image in a dict of `KEYS`, or the value itself if it is not a dict.

    Raises ValueError if the dict holds no image, or if it holds a size, which would be ignored.
    """
    while isinstance(value, dict):
        sizes = [key for key in SIZE_KEYS if value.get(key) is not None]
        if sizes:
            raise ValueError(
                f"{', '.join(sizes)} beside the image would have no effect; set data.min_pixels and data.max_pixels."
            )
        filled = [value[key] for key in KEYS if value.get(key) is not None]
        if not filled:
            raise ValueError(f"found a dict of {', '.join(map(str, value))}, expected one of {', '.join(KEYS)}.")
        value = filled[0]
    return value


def image_path(value: Any) -> str | Path | None:
    """Return the path of an image value, or None if the value is the image itself. Raises like `image_content`."""
    content = image_content(value)
    if isinstance(content, str) and not BASE64.match(content):
        return content.removeprefix("file://")
    return content if isinstance(content, Path) else None


def image_file(value: Any, folder: Path) -> str | None:
    """Return the absolute path of an image value, or None if the value is the image itself."""
    path = image_path(value)
    return None if path is None else str((folder / path).absolute())


def open_pillow(file: Any) -> Image.Image:
    """Open an image, and read its header. Raises ValueError if the file is not an image in one of `FORMATS`."""
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"not an image in one of the formats {', '.join(FORMATS)}.") from error


def open_image(value: Any, folder: Path) -> AbstractContextManager[Any]:
    """Open an image's file, or its encoded bytes as a binary file. A file that is open already stays open.

    `value` is a path (relative to `folder`), encoded bytes, an open file, base64 text, or a dict of one of these.
    Raises TypeError for anything else, ValueError for a URL or a path that is not a regular file, OSError if the file
    cannot be read.
    """
    content, path = image_content(value), image_path(value)
    if path is not None:
        return open_regular_file(folder, str(path))
    if isinstance(content, str):
        encoded = content.partition(",")[2] if content.startswith("data:") else content
        return BytesIO(base64.b64decode(encoded.encode("ascii").translate(None, WHITESPACE), validate=True))
    if isinstance(content, bytes):
        return BytesIO(content)
    if hasattr(content, "read"):
        return rewound(content)
    raise TypeError(
        f"found a {type(content).__name__}, expected a PIL image, a path, bytes, base64 text, or a dict of one of them."
    )


@contextmanager
def rewound(file: Any) -> Iterator[Any]:
    """Yield an open file at its start, and rewind it afterwards, since a row is read more than once."""
    file.seek(0)
    try:
        yield file
    finally:
        file.seek(0)


def open_regular_file(folder: Path, path: str) -> Any:
    """Open a regular file. Other kinds of file are refused, since reading a FIFO or a device may never end."""
    if "://" in path:
        raise ValueError("URLs are not fetched; download the file and give its path.")
    if not path:
        raise ValueError("its path is empty; a row without an image has null or an empty list.")
    mode = (folder / path).stat().st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"{folder / path} is {FILE_TYPES[stat.S_IFMT(mode)]}; only regular files are read.")
    return (folder / path).open("rb")


def encoded_image(value: Any, folder: Path) -> bytes:
    """Return the bytes of an image's file. A PIL image is encoded as PNG. Raises like `open_image`."""
    content = image_content(value)
    if isinstance(content, Image.Image):
        return png_bytes(content)
    with open_image(content, folder) as file:
        return file.read()


def decode_image(file: bytes) -> Image.Image:
    """Return the pixels of a file, as `read_image` does. The file must have been read or written here before."""
    return ImageOps.exif_transpose(Image.open(BytesIO(file), formats=FORMATS)).convert("RGB")


def looks_like_image(value: Any) -> bool:
    """Return whether a value seems to be an image in any usual form, or a list, tuple or dict with one."""
    return any_in(value, is_image_like)


def is_image_like(value: Any) -> bool:
    """Return whether a value seems to be an image."""
    match value:
        case Image.Image():
            return True
        case str() | Path():
            return bool(BASE64.match(str(value))) or ends_like(value, SUFFIX)
        case np.ndarray():
            return value.ndim == 3 and value.dtype == np.uint8
    if not isinstance(value, bytes) and not hasattr(value, "read"):
        return False
    try:
        with BytesIO(value) if isinstance(value, bytes) else rewound(value) as file:
            Image.open(file, formats=FORMATS)
        return True
    except Exception:  # a decoder can raise anything
        return False


def png_bytes(image: Image.Image) -> bytes:
    """Encode the image as PNG, which is lossless."""
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def image_urls(sample: Sample) -> list[str]:
    """Return the sample's images as data URLs: the original file if servers decode the same pixels, else a PNG."""
    return [data_url(sample.encoded_images.get(i) or png_bytes(image)) for i, image in enumerate(sample.images)]


def data_url(file: bytes) -> str:
    """Return an encoded image as a data URL."""
    format = Image.open(BytesIO(file), formats=FORMATS).format
    return f"data:{Image.MIME[str(format)]};base64,{base64.b64encode(file).decode()}"


def pixel_limits(data: DataConfig) -> dict[str, int]:
    """Return the configured limits on an image's pixels, by the names that processors use."""
    limits = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
    return {name: value for name, value in limits.items() if value is not None}


def _check_header(image: Image.Image, max_pixels: int) -> int:
    width, height = max(image.size, _tile_size(image), key=math.prod)
    if width * height > max_pixels:
        raise TooManyPixels(
            f"{width} × {height} = {width * height} pixels are more than data.max_image_pixels = {max_pixels}. "
            "Shrink the file, or raise that limit."
        )
    if image.mode.startswith(("I", "F")):
        raise ValueError(
            f"mode {image.mode} has more than 8 bits a channel, which RGB would clip to white or black. "
            "Scale it to 8 bits first."
        )
    return width * height


def _tile_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height of the tiles of a TIFF, else (0, 0). A tile is decoded whole, however small the image."""
    tags = getattr(image, "tag_v2", {})
    return int(tags.get(TiffImagePlugin.TILEWIDTH, 0)), int(tags.get(TiffImagePlugin.TILELENGTH, 0))


def _is_sent_as_it_is(image: Image.Image) -> bool:
    """Return whether the file can be sent unchanged.

    It must not need conversion, rotation or the choice of a frame, since a server may do these differently.
    """
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    is_animated = getattr(image, "is_animated", False)
    return image.format in SENT_FORMATS and image.mode == "RGB" and orientation == 1 and not is_animated
