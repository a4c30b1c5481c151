"""Checkpoints by name (`org/name`, `org/name@revision`), from the Hub or its cache.

The library `huggingface_hub` does the work, so its settings hold: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from pathlib import Path

from server.commands.console import UserError, say

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@([\w./-]+))?")
_CONFIGS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
_SAFETENSORS = ("model.safetensors", "model-*-of-*.safetensors")
_TORCH = ("pytorch_model.bin", "pytorch_model-*-of-*.bin")
_UNREAD = ("*/*", "consolidated*", "tf_model*", "flax_model*", "*.index.json")
_INDEX = {_SAFETENSORS: "model.safetensors.index.json", _TORCH: "pytorch_model.bin.index.json"}


def is_name(model: str) -> bool:
    """Whether a text has the form org/name or org/name@revision."""
    return _NAME.fullmatch(model) is not None


def directory(model: str) -> Path:
    """The directory with a checkpoint's files; downloads those that the cache lacks.

    Raises:
      UserError: there is none, the caller may not read it, or the Hub cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub import errors

    match = _NAME.fullmatch(model)
    assert match is not None
    name, revision = match.groups()
    try:
        files = wanted(huggingface_hub.HfApi().list_repo_files(name, revision=revision))
        say(f"{model}: downloading what is not in the cache")
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=files))
    except (errors.HTTPError, OSError, ValueError) as problem:  # pyright: ignore[reportPrivateImportUsage]
        if (why := _refusal(problem, name, revision)) is not None:
            raise UserError(f"--model {model}: {why}") from None
    return _cached(model, name, revision)


def _cached(model: str, name: str, revision: str | None) -> Path:
    """The directory in the cache, if that has the whole checkpoint. Raises UserError."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    for weights in (_SAFETENSORS, _TORCH):
        with contextlib.suppress(LocalEntryNotFoundError):
            found = huggingface_hub.snapshot_download(
                name,
                revision=revision,
                local_files_only=True,
                allow_patterns=[*_CONFIGS, *weights],
                ignore_patterns=[*_UNREAD],
            )
            say(f"{model} is taken from the cache: the Hub cannot be reached")
            return Path(found)
    raise UserError(f"--model {model} is not a directory, it is not in the cache, and the Hub cannot be reached")


def wanted(files: list[str]) -> list[str]:
    """The names of the files that an engine reads, of those that a checkpoint has."""
    weights = next((kind for kind in (_SAFETENSORS, _TORCH) if any(_matches(file, kind) for file in files)), ())
    index = _INDEX.get(weights)
    return [
        file
        for file in files
        if _matches(file, weights) or file == index or (_matches(file, _CONFIGS) and not _matches(file, _UNREAD))
    ]


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def _refusal(problem: Exception, name: str, revision: str | None) -> str | None:
    """Why the Hub gives nothing, in words; None if it could not be reached."""
    from huggingface_hub import errors

    match problem:
        case errors.GatedRepoError():
            return f"{name} is gated: accept its conditions on its page, and set HF_TOKEN to a token of your account"
        case errors.RepositoryNotFoundError():
            return f"{name} is neither a directory nor on the Hub (or it is private, and HF_TOKEN may not read it)"
        case errors.RevisionNotFoundError():
            return f"{name} has no revision {revision}"
        case errors.HFValidationError():
            return f"{name} is neither a directory nor the name of a checkpoint"
        case errors.HfHubHTTPError() if problem.response is not None and problem.response.status_code in (401, 403):
            return f"the Hub refuses to give {name}; set HF_TOKEN to a token that may read it"
        case _:
            return None


def name_of(path: Path) -> str:
    """A checkpoint's name: its directory's, or org/name for a snapshot in the Hub's cache."""
    parents = path.resolve().parents
    if len(parents) > 1 and parents[0].name == "snapshots" and parents[1].name.startswith("models--"):
        return parents[1].name.removeprefix("models--").replace("--", "/", 1)
    return path.name
