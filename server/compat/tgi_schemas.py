"""Schemas of TGI's bodies. `SamplingParams` checks the ranges of sampling parameters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from jaxserve.generation.samples import MAX_SAMPLES
from jaxserve.sampling_params import MAX_LOGPROBS
from server.http.body import Body
from server.http.schemas import PLAIN_PARAMS, Seed, Stops, sampling_body

_TgiSampling = sampling_body("_TgiSampling", *(param for param in PLAIN_PARAMS if param.in_tgi))


class TgiGrammar(Body):
    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | str


class TgiParameters(_TgiSampling):
    """TGI's parameters; `tgi.py` refuses those that are not served."""

    best_of: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    decoder_input_details: bool = False
    details: bool = False
    do_sample: bool = False
    grammar: TgiGrammar | None = None
    adapter_id: str | None = None
    max_new_tokens: int | None = Field(default=None, ge=1)
    return_full_text: bool | None = None
    seed: Seed | None = None
    stop: Stops = Field(default_factory=list)
    temperature: float | None = Field(default=None, gt=0)
    top_n_tokens: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    truncate: int | None = Field(default=None, ge=1)
    watermark: bool = False


class TgiBody(Body):
    inputs: str
    parameters: TgiParameters | None = None
    stream: bool = False
