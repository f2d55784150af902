"""Recognize file formats by their first bytes: plain text, compressions that are read, and formats that are refused."""

import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ds_encdec.base.types import DataError

# Compressed bytes unpacked at once: few, since the best compressors pack twenty thousand bytes into one.
_BLOCK_BYTES = 1 << 12
_LOOKED_AT_BYTES = 512
# A frame that zstd and LZ4 skip, with its size; parallel and seekable compressors write such frames.
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18(.{4})", re.DOTALL)
# A function that yields a file's unpacked blocks. Raises OSError, ValueError, EOFError, zlib.error, LZMAError.
Opener = Callable[[str], Iterator[bytes]]


NOT_UTF8 = "not UTF-8 text. Convert the file, for example with `iconv -f latin1 -t utf-8`"
TWICE = "it is compressed twice. Unpack it once, or leave it out of data.data_files"
UNPACKABLE = "cannot be unpacked: damaged, or cut short"


def _streams(new: Callable[[], Any], magic: bytes, path: str) -> Iterator[bytes]:
    """Yield the blocks of consecutive compressed streams. Zeros between them and at the end are padding."""
    with open(path, "rb") as file:
        rest = file.read(_BLOCK_BYTES)
        while rest:
            stream = new()
            yield stream.decompress(rest)
            while not stream.eof:
                if not (block := file.read(_BLOCK_BYTES)):
                    raise EOFError("it ends within the compressed data")
                yield stream.decompress(block)
            rest = stream.unused_data.lstrip(b"\0")
            while len(rest) < len(magic) and (block := file.read(_BLOCK_BYTES)):
                rest = (rest + block).lstrip(b"\0")
            if rest and not rest.startswith(magic):
                raise ValueError("other bytes follow the compressed data; `gzip -dc` and its like pass over them")


def _arrow(codec: str, path: str) -> Iterator[bytes]:
    # Imported here because it takes 0.2 s, and most runs do not need it.
    import pyarrow

    with pyarrow.CompressedInputStream(pyarrow.OSFile(path), codec) as stream:
        while block := stream.read(1 << 20):
            yield block


# Patterns of the first bytes of files that are not plain UTF-8 text, with the function that unpacks them, or advice if
# they are not read. UTF-16 without a mark is recognized by four Latin characters in a row.
_KINDS: tuple[tuple[bytes, Opener | str], ...] = (
    (rb"\x1f\x8b\x08", partial(_streams, partial(zlib.decompressobj, 31), b"\x1f\x8b")),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", partial(_streams, bz2.BZ2Decompressor, b"BZh")),
    (rb"\xfd7zXZ\0", partial(_streams, lzma.LZMADecompressor, b"\xfd7zXZ\0")),
    (rb"\x5d\0\0", partial(_streams, lzma.LZMADecompressor, b"\x5d\0\0")),
    (rb"x[\x01\x9c\xda]", partial(_streams, zlib.decompressobj, b"x")),
    (rb"\x28\xb5\x2f\xfd", partial(_arrow, "zstd")),
    (rb"\x04\x22\x4d\x18", partial(_arrow, "lz4")),
    (rb"PK(\x03\x04|\x05\x06|\x07\x08)", "a zip archive: unpack it with `unzip` (a workbook: save its sheet as CSV)"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it with `7z x`"),
    (rb"Rar!\x1a\x07", "a rar archive: unpack it with `unrar x`"),
    (rb".{257}ustar", "a tar archive: unpack it with `tar -xf`"),
    (rb"PAR1", "a parquet file: set data.dataset_name=parquet"),
    (rb"(ARROW1\0\0|\xff\xff\xff\xff.{3}\0)", "an Arrow file: name its folder in data.dataset_name"),
    (rb"version https://git-lfs\.github\.com/spec/", "a pointer of Git LFS, and not the file: run `git lfs pull`"),
    (rb"(\xff\xfe\0\0|\0\0\xfe\xff)", "UTF-32 text: convert it, `iconv -f utf-32 -t utf-8`"),
    (rb"(\xff\xfe|\xfe\xff)", "UTF-16 text: convert it, `iconv -f utf-16 -t utf-8`"),
    (rb"(.[^\0])*([^\0]\0){4}([^\0].)*", "UTF-16 text: convert it, `iconv -f utf-16le -t utf-8`"),
    (rb"([^\0].)*(\0[^\0]){4}(.[^\0])*", "UTF-16 text: convert it, `iconv -f utf-16be -t utf-8`"),
)


def packing(path: str) -> Opener | None:
    """Return the function that unpacks the file, or None. Raises OSError, and DataError for a refused format."""
    with open(path, "rb") as file:
        start = file.read(_LOOKED_AT_BYTES)
        skipped = 0
        while frame := _SKIPPABLE.match(start):
            skipped += 8 + int.from_bytes(frame[1], "little")
            file.seek(skipped)
            start = file.read(_LOOKED_AT_BYTES)
    return _opener(start, path)


def _opener(start: bytes, path: str) -> Opener | None:
    found = next((what for pattern, what in _KINDS if re.match(pattern, start, re.DOTALL)), None)
    if isinstance(found, str):
        raise DataError(f"{path}: {found}, or leave it out of data.data_files")
    return found


def first_bytes(path: str, size: int) -> tuple[bytes, bool]:
    """Return the first `size` bytes of the unpacked file, and whether that is all. Raises DataError, OSError."""
    if (opener := packing(path)) is None:
        with open(path, "rb") as file:
            content = file.read(size + 1)
    else:
        content = b""
        try:
            for block in opener(path):
                content += block
                if len(content) > size:
                    break
        except (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise DataError(f"{path}: {UNPACKABLE} ({error})") from error
        if _opener(content[:_LOOKED_AT_BYTES], f"{path}, unpacked") is not None:
            raise DataError(f"{path}: {TWICE}")
    return content[:size], len(content) <= size
