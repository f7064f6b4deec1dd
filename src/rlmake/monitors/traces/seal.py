"""Compressed chunks: zstd frames of 4 MiB of text each, with a table of them at the end, so that a line can be read
without what lies before it. The table is that of the zstd seekable format (contrib/seekable_format of zstd)."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import zstandard

FRAME_BYTES = 4 << 20
LEVEL = 3
SKIPPABLE, MAGIC = 0x184D2A5E, 0x8F92EAB1
FOOTER = struct.Struct("<IBI")
ENTRY = struct.Struct("<II")
HEAD = struct.Struct("<II")


def seal(path: Path) -> Path:
    """Compress `path` to `path.zst` beside it and remove it. A kill at any moment leaves one whole form of it."""
    target = path.with_name(path.name + ".zst")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    entries = []
    try:
        with open(path, "rb") as source, open(temporary, "wb") as out:
            while block := source.read(FRAME_BYTES):
                frame = compressor.compress(block)
                entries.append((len(frame), len(block)))
                out.write(frame)
            table = b"".join(ENTRY.pack(*entry) for entry in entries) + FOOTER.pack(len(entries), 0, MAGIC)
            out.write(HEAD.pack(SKIPPABLE, len(table)) + table)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return target


def frames(path: Path) -> list[tuple[int, int, int]]:
    """`(offset of the text, offset in the file, bytes in the file)` of every frame. `ValueError`: no such file."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < FOOTER.size + HEAD.size:
            raise ValueError(f"{path.name}: too short for a sealed chunk")
        file.seek(size - FOOTER.size)
        count, _, magic = FOOTER.unpack(file.read(FOOTER.size))
        length = count * ENTRY.size + FOOTER.size
        if magic != MAGIC or length + HEAD.size > size:
            raise ValueError(f"{path.name}: no table of frames at its end")
        file.seek(size - length)
        table = file.read(count * ENTRY.size)
    found, text, place = [], 0, 0
    for packed, plain in ENTRY.iter_unpack(table):
        found.append((text, place, packed))
        text, place = text + plain, place + packed
    return found


def pieces(path: Path, start: int) -> Iterator[bytes]:
    """The text of a sealed chunk from byte `start` on, a frame at a time."""
    decompressor = zstandard.ZstdDecompressor()
    table = frames(path)
    with open(path, "rb") as file:
        for number, (text, place, packed) in enumerate(table):
            following = table[number + 1][0] if number + 1 < len(table) else None
            if following is not None and following <= start:
                continue
            file.seek(place)
            data = file.read(min(packed, 2 * FRAME_BYTES))
            if zstandard.frame_content_size(data) > FRAME_BYTES:  # what it says is what would be given memory
                raise ValueError(f"{path.name}: a frame of more than {FRAME_BYTES} bytes")
            block = decompressor.decompress(data, max_output_size=FRAME_BYTES)
            yield block[max(0, start - text) :]
