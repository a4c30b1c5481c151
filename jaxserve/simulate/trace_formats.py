"""Files of recorded traffic: Azure's CSV, Mooncake's lines of JSON, CSV with given columns."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_LINE = "2023-11-16 18:15:46.68,374,44"
_MOONCAKE_LINE = '{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}'


class TraceRecord(NamedTuple):
    """One request in a trace: seconds, lengths, and prefix blocks if the trace has them."""

    time: float
    prompt_length: int
    output_length: int
    blocks: tuple[int, ...] = ()
    tenant: str = ""


def read(path: Path, limit: int | None, columns: Mapping[str, str] | None) -> list[TraceRecord]:
    """The first requests of a trace, by time (see `workload.read_trace`).

    Raises:
      ValueError: the file has another format; the message names file and line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = sorted(islice(_records(file, path, columns), limit), key=lambda record: record.time)
    except OSError as error:
        raise ValueError(f"{path}: the trace cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: the trace is not text: {error}") from None
    except csv.Error as error:
        raise ValueError(f"{path}: the trace is not CSV: {error}") from None
    if not found:
        raise ValueError(f"{path}: the trace holds no requests")
    return found


def _records(file: TextIO, path: Path, columns: Mapping[str, str] | None) -> Iterator[TraceRecord]:
    """The requests of a trace in either format, or with these columns."""
    is_mooncake = columns is None and file.readline().lstrip().startswith("{")
    file.seek(0)
    if is_mooncake:
        maker, parse, example = "a Mooncake", _parse_mooncake, _MOONCAKE_LINE
        lines: Iterable[Any] = ((number, text) for number, text in enumerate(file, start=1) if text.strip())
    elif columns is not None:
        maker, parse, example = "this", partial(_parse_columns, columns), ",".join(columns.values())
        rows = csv.DictReader(file)
        if missing := set(columns.values()) - set(rows.fieldnames or ()):
            names = ", ".join(map(str, rows.fieldnames or ()))
            raise ValueError(f"{path}: there is no column {min(missing)}; the first line names {names}")
        lines = enumerate(rows, start=2)
    else:
        maker, parse, example = "an Azure", _parse_azure, _AZURE_LINE
        names = _AZURE_COLUMNS if _has_no_header(file) else None
        rows, first = csv.DictReader(file, names), 1 if names else 2
        if not set(_AZURE_COLUMNS) <= set(rows.fieldnames or ()):
            raise ValueError(
                f"{path}: unknown trace format; expected CSV with the columns {','.join(_AZURE_COLUMNS)}, "
                "or one JSON object a line with timestamp, input_length, output_length and hash_ids; other columns are "
                "named with --columns time=...,prompt=...,output=..."
            )
        lines = enumerate(rows, start=first)
    for number, line in lines:
        try:
            yield parse(line)
        except (ValueError, TypeError, KeyError, OverflowError) as error:  # OverflowError: an infinite number
            what = f"not a request of {maker} trace: {error if isinstance(error, ValueError) else repr(error)}"
            raise ValueError(f"{path}, line {number}: {what}; a line looks like {example}") from None


def _has_no_header(file: TextIO) -> bool:
    """Whether a CSV file's first line is a request: its columns are then Azure's in order."""
    cells = next(csv.reader([file.readline()]), [])
    file.seek(0)
    try:
        _parse_azure(dict(zip(_AZURE_COLUMNS, cells, strict=True)))
    except (ValueError, OverflowError):
        return False
    return True


def _parse_azure(row: Any) -> TraceRecord:
    time, prompt, output = (row[column] for column in _AZURE_COLUMNS)
    return TraceRecord(datetime.fromisoformat(time).timestamp(), max(1, int(prompt)), max(1, int(output)))


def _parse_columns(columns: Mapping[str, str], row: Any) -> TraceRecord:
    time = row[columns["time"]]
    try:
        seconds = float(time)
    except ValueError:
        seconds = datetime.fromisoformat(time).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"{columns['time']} is {time}")
    prompt, output = (max(1, int(row[columns[name]])) for name in ("prompt", "output"))
    return TraceRecord(seconds, prompt, output, tenant=row[columns["tenant"]] if "tenant" in columns else "")


def _parse_mooncake(text: Any) -> TraceRecord:
    record = json.loads(text)
    if not math.isfinite(milliseconds := float(record["timestamp"])):
        raise ValueError(f"timestamp is {milliseconds}")
    prompt, output = (max(1, int(record[name])) for name in ("input_length", "output_length"))
    return TraceRecord(milliseconds / 1000, prompt, output, tuple(map(int, record.get("hash_ids", ()))))
