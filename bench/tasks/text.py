"""English text: Bible verses from the SWORD modules that Debian packages."""

from __future__ import annotations

import re
import struct
import zlib

from bench.tasks.sources import debian_file

KING_JAMES = "engKJV2006eb"
WORLD_ENGLISH = "engWEB2015eb"
_PACKAGES = {KING_JAMES: "sword-text-kjv", WORLD_ENGLISH: "sword-text-web"}
_BLOCK = struct.Struct("<III")
_VERSE = struct.Struct("<IIH")


def new_testament(module: str) -> list[str]:
    """The verses of a translation's New Testament in the file's order, without markup; "" where a number is unused.

    A SWORD zText module has zlib-compressed blocks (.bzz), their offsets and sizes (.bzs: offset, compressed size,
    plain size) and, for each verse, where its text lies (.bzv: block, offset, size).
    """
    folder = debian_file(f"/usr/share/sword/modules/texts/ztext/{module}", _PACKAGES[module])
    packed = (folder / "nt.bzz").read_bytes()
    blocks = [
        zlib.decompress(packed[offset : offset + size]) if size else b""
        for offset, size, _ in _BLOCK.iter_unpack((folder / "nt.bzs").read_bytes())
    ]
    return [
        _plain(blocks[block][offset : offset + size].decode("utf-8", "replace")) if size else ""
        for block, offset, size in _VERSE.iter_unpack((folder / "nt.bzv").read_bytes())
    ]


def _plain(osis: str) -> str:
    without_notes = re.sub(r"<(note|title)\b.*?</\1>", " ", osis, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", without_notes)).strip()
