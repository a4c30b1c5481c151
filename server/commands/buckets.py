"""Checkpoints in object stores, such as gs://bucket/folder and s3://bucket/folder.

The library `fsspec` reads them, so the settings and credentials of its file systems hold (those of `gcsfs`, `s3fs`).
The files that an engine needs are kept in a folder on this machine, and fetched again where they have changed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from jaxserve.multihost.failure import one_line
from server.commands import hub
from server.commands.console import UserError, progress_bars, say

_URL = re.compile(r"([a-z][a-z0-9]+):/+(.+)")
_VERSIONS = ".versions.json"  # in a folder: the version of each file that is whole


def is_url(model: str) -> bool:
    """Whether a text has the form store://bucket/folder."""
    return _URL.fullmatch(model) is not None


def directory(model: str, cache: Path) -> Path:
    """The directory with a checkpoint's files; downloads those that the cache lacks.

    Args:
      cache: where the directories of all checkpoints are.

    Raises:
      UserError: there is no checkpoint, it cannot be read, or the store's library is not installed.
    """
    match = _URL.fullmatch(model)
    assert match is not None
    store, path = match.groups()  # a Path has made one slash of two
    url = f"{store}://{path.rstrip('/')}"
    try:
        import fsspec

        files, root = fsspec.url_to_fs(url)
        # Stores differ in what they list by default.
        found = [each["name"] for each in files.ls(root, detail=True) if each["type"] == "file"]
        listed = {Path(name).name: name for name in found}
    except ImportError as problem:
        extra = {"gs": "gs", "gcs": "gs", "s3": "s3"}.get(store)
        hint = f"; pip install 'jaxserve[{extra}]'" if extra else ""
        raise UserError(f"--model {url}: {one_line(problem)}{hint}") from None
    except FileNotFoundError:
        raise UserError(f"--model {url}: there is no such folder") from None
    except Exception as problem:  # the libraries of stores raise their own kinds
        raise UserError(f"--model {url}: {one_line(problem)}") from None
    wanted = hub.wanted(sorted(listed))
    if "config.json" not in wanted:
        raise UserError(f"--model {url}: the folder has no config.json, so it is no checkpoint")
    folder = cache / store / path.strip("/")
    try:
        _download(files, {name: listed[name] for name in wanted}, folder, url)
    except Exception as problem:
        raise UserError(f"--model {url}: {one_line(problem)}") from None
    return folder


def _download(files: Any, wanted: dict[str, str], folder: Path, url: str) -> None:
    """Brings a folder's files to these versions, and removes all others."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / _VERSIONS
    have = json.loads(record.read_text()) if record.exists() else {}
    versions = {name: str(files.ukey(path)) for name, path in wanted.items()}
    missing = [name for name in wanted if have.get(name) != versions[name] or not (folder / name).exists()]
    kept = {name: version for name, version in have.items() if name in wanted and name not in missing}
    for old in folder.iterdir():
        if old.is_file() and old.name not in kept:
            old.unlink()
    record.write_text(json.dumps(kept))
    if not missing:
        return
    say(f"{url}: downloading {len(missing)} files")
    with progress_bars() as progress:
        for done, name in enumerate(missing):
            progress("downloading", done, len(missing))
            files.get_file(wanted[name], str(folder / f"{name}.part"))
            os.replace(folder / f"{name}.part", folder / name)
            kept[name] = versions[name]
            record.write_text(json.dumps(kept))
        progress("downloading", len(missing), len(missing))
