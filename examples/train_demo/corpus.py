"""The demo model's text: Jane Austen's six novels by chapter, and the held-out part.

The novels are in the public domain and come from Debian's package r-cran-janeaustenr (MIT). R keeps them as character
vectors of wrapped lines; here a chapter becomes one document with one paragraph a line.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

NOVELS = ("r-cran-janeaustenr", "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")  # package, file in it
WORD_LISTS = (("wamerican", "usr/share/dict/american-english"), ("wbritish", "usr/share/dict/british-english"))

# Of every PERIOD consecutive chapters one is for validation and the two after it are the held-out test: contiguous
# text, from every novel. The rest is for training, of the tokenizer too.
PERIOD = 40
VALIDATION = (36,)
TEST = (37, 38)

_HEADING = re.compile(r"\s*(chapter|volume)\s+([ivxlc]+|\d+)\.?\s*", re.IGNORECASE)
_ORNAMENT = re.compile(r"[\s*]*|\s*\[(At this point|End volume).*|\s*(finis|the end)\s*", re.IGNORECASE)
_BACK_MATTER = re.compile(r"A NOTE ON THE TEXT|\*Vide a letter.*")


class CorpusError(ValueError):
    """The text could not be fetched or read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Documents by use."""

    train: list[str]
    validation: list[str]
    test: list[str]


def split(documents: list[str]) -> Split:
    """Splits by the rule above; a short list counts as the end of a period. Raises CorpusError."""
    if len(documents) < 4:
        raise CorpusError(f"the corpus has {len(documents)} documents; at least 4 are needed to hold some out")
    shift = max(PERIOD - 1 - len(documents), 0)
    place = [(i + shift) % PERIOD for i in range(len(documents))]
    held_out = (*VALIDATION, *TEST)
    return Split(
        train=[text for text, at in zip(documents, place, strict=True) if at not in held_out],
        validation=[text for text, at in zip(documents, place, strict=True) if at in VALIDATION],
        test=[text for text, at in zip(documents, place, strict=True) if at in TEST],
    )


def read_documents(path: Path | None) -> list[str]:
    """The documents of a text file, separated by form feeds; without a path, the novels.

    Raises CorpusError.
    """
    if path is None:
        return [chapter for novel in fetch_novels() for chapter in chapters(novel)]
    return [document for part in read_text(path).split("\f") if (document := part.strip())]


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises CorpusError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} cannot be read as UTF-8 text: {error}") from error


def fetch_novels() -> list[list[str]]:
    """The lines of each novel, in the package's order. Raises CorpusError."""
    return read_character_vectors(fetch_file(*NOVELS))


def fetch_words() -> frozenset[str]:
    """Debian's American and British word lists. Raises CorpusError."""
    return frozenset(word for source in WORD_LISTS for word in fetch_file(*source).decode("utf-8").split())


def fetch_file(package: str, name: str) -> bytes:
    """A file out of a Debian package, which is downloaded and not installed. Raises CorpusError."""
    with tempfile.TemporaryDirectory() as folder:
        _run(["apt-get", "download", package], folder)
        found = list(Path(folder).glob(f"{package}_*.deb"))
        if len(found) != 1:
            raise CorpusError(f"apt-get download {package} left {len(found)} packages, one was expected")
        _run(["dpkg", "-x", found[0].name, "."], folder)
        file = Path(folder, name)
        if not file.is_file():
            raise CorpusError(f"{found[0].name} holds no {name}")
        return file.read_bytes()


def _run(command: list[str], folder: str) -> None:
    if shutil.which(command[0]) is None:
        raise CorpusError(
            f"{command[0]} was not found: text and word lists come out of Debian packages; "
            "elsewhere give them with --corpus and --words"
        )
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CorpusError(
            f"{' '.join(command)} failed ({done.stderr.strip() or done.returncode}); "
            "try `apt-get update`, or give the text with --corpus and word lists with --words"
        )


def read_character_vectors(data: bytes) -> list[list[str]]:
    """Every character vector of an R lazy-load database (.rdb).

    A record is its length (big endian) and a zlib stream of R's XDR serialisation, "R Internals" section 1.8: "X\\n",
    three version numbers, from version 3 on the native encoding, then type flags, a count and the strings, each with
    flags and a length. Raises CorpusError for anything else.
    """
    vectors = []
    try:
        while data:
            stream = zlib.decompressobj()
            record = stream.decompress(data[4:])
            data = stream.unused_data
            (version,) = struct.unpack_from(">i", record, 2)
            at = 14 + (4 + struct.unpack_from(">i", record, 14)[0] if version >= 3 else 0)
            flags, count = struct.unpack_from(">2i", record, at)
            if record[:2] != b"X\n" or flags & 0xFF != 16:
                raise CorpusError("the R database holds something else than character vectors")
            at += 8
            lines = []
            for _ in range(count):
                _, length = struct.unpack_from(">2i", record, at)
                lines.append(record[at + 8 : at + 8 + length].decode("utf-8"))
                at += 8 + length
            vectors.append(lines)
    except (zlib.error, struct.error, UnicodeDecodeError) as error:
        raise CorpusError(f"the R database is damaged: {error}") from error
    return vectors


def chapters(lines: list[str]) -> list[str]:
    """A novel's chapters without headings: a line for each paragraph, no underscores of italics.

    Text before the first heading (title, advertisement) and after the last chapter is left out.
    """
    found: list[list[str]] = []
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if _BACK_MATTER.fullmatch(line):
            break
        heading = _HEADING.fullmatch(line)
        if heading or _ORNAMENT.fullmatch(line):
            if paragraph:
                found[-1].append(" ".join(" ".join(paragraph).replace("_", "").split()))
            paragraph = []
            if heading:
                found.append([])
        elif found:
            paragraph.append(line)
    return ["\n".join(paragraphs) for paragraphs in found if paragraphs]
