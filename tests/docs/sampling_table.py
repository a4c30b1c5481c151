"""The table of sampling parameters in docs/features.md; `python -m tests.docs.sampling_table` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxserve.fields import Param
from jaxserve.sampling_params import SAMPLING_PARAMS
from server.http import schemas
from server.proto.vllm.grpc.engine import vllm_engine_pb2

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
HEADING = "## Sampling parameters\n"
COLUMNS = ("gRPC, Python", "meaning", "values", "default", "command line", "OpenAI", "TGI", "vLLM")
GRAMMAR_FLAGS = ["--json-schema", "--json-object", "--regex", "--choice", "--lark"]
# Names that protocols have instead of, or besides, ours.
OPENAI = {
    "max_tokens": ["max_completion_tokens"],
    "logprobs": ["top_logprobs"],
    "prompt_logprobs": ["echo"],
    "grammar": [
        *("response_format", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    ],
}
TGI = {
    "max_tokens": ["max_new_tokens"],
    "temperature": ["temperature", "do_sample"],
    "seed": ["seed"],
    "stop": ["stop"],
    "logprobs": ["details", "top_n_tokens"],
    "prompt_logprobs": ["decoder_input_details"],
    "grammar": ["grammar"],
}
VLLM = {"grammar": ["json_schema", "json_object", "regex", "choice"]}


def table() -> str:
    """The table as Markdown."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(param) for param in SAMPLING_PARAMS.values())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def names(column: str, param: Param) -> list[str]:
    """The names of a parameter in a column of the table."""
    ours = [param.name]
    match column:
        case "command line":
            return GRAMMAR_FLAGS if param.name == "grammar" else ["--" + param.name.replace("_", "-")]
        case "OpenAI":
            fields: Any = {*schemas.CompletionBody.model_fields, *schemas.ChatBody.model_fields}
            return [name for name in ours if name in fields] + OPENAI.get(param.name, [])
        case "TGI":
            return (ours if param.in_tgi else []) + TGI.get(param.name, [])
        case "vLLM":
            known = vllm_engine_pb2.SamplingParams.DESCRIPTOR.fields_by_name
            return VLLM.get(param.name, []) + [name for name in ours if name in known]
        case _:
            return ours


def _row(param: Param) -> tuple[str, ...]:
    cells = {column: ", ".join(f"`{name}`" for name in names(column, param)) or "–" for column in COLUMNS}
    default = {"()": "none", "None": "off", "False": "false"}.get(str(param.default)) or f"{param.default:g}"
    cells |= {"meaning": param.help, "values": _values(param), "default": param.default_help or default}
    return tuple(cells.values())


def _values(param: Param) -> str:
    low, high = param.minimum, param.maximum
    if param.kind is bool:
        return "true, false"
    if param.name in ("grammar", "seed"):
        return "–" if param.name == "grammar" else "64 bits"
    limits = "" if low is None else f"{'>' if param.exclusive else '≥'} {low:g}"
    limits += "" if high is None else f", ≤ {high:g}"
    items = "" if param.max_items is None else f"at most {param.max_items}"
    return ", ".join(filter(None, (items, limits)))


def page(text: str) -> str:
    """The page with its table written anew."""
    before, after = text.split(HEADING)
    start = after.index("| ")
    end = after.index("\n\n", start) + 1
    return before + HEADING + after[:start] + table() + after[end:]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
