"""The tokenizer files of a checkpoint as one archive, for programs that tokenize elsewhere."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from jaxserve.text.tokenizer_files import TOKENIZER_FILES

_MORE_FILES = ("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json")
_TIME = (1980, 1, 1, 0, 0, 0)  # the same files make the same archive


def tokenizer_archive(directory: Path) -> bytes:
    """A zip of the files that a tokenizer and its chat template are made from, without folders."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (*TOKENIZER_FILES, *_MORE_FILES):
            if (file := directory / name).is_file():
                archive.writestr(zipfile.ZipInfo(name, _TIME), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return written.getvalue()
