"""KV events as vLLM sends them: msgpack maps over ZMQ, `vllm.grpc.engine` messages.

The maps are those of vllm/distributed/kv_events.py (v0.26); fields that have their default are left out.
"""

from __future__ import annotations

from typing import Any

from jaxserve.scheduler.prefix_changes import BlocksRemoved, BlocksStored, CacheCleared, PrefixChange
from server.kv_events import KvEventBatch, number_of
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as pb

_MEDIUM = "GPU"  # routers know the accelerator's memory by this name, also a TPU's
_RANK = 0  # all replicas share one port


def event_maps(batch: KvEventBatch) -> list[Any]:
    """The batch as data for msgpack: time, events and rank."""
    return [batch.time, [_event_map(change) for change in batch.changes], _RANK]


def _event_map(change: PrefixChange) -> dict[str, Any]:
    match change:
        case BlocksStored():
            event: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": [number_of(digest) for digest in change.digests],
                "parent_block_hash": None if change.parent is None else number_of(change.parent),
                "token_ids": change.tokens.tolist(),
                "block_size": change.block_size,
                "lora_id": None,
                "medium": _MEDIUM,
                "lora_name": None,
            }
            if change.salt and change.parent is None:  # the hashes of later blocks follow from the first one's
                event["extra_keys"] = [[change.salt], *[None] * (len(change.digests) - 1)]
            return event
        case BlocksRemoved():
            hashes = [number_of(digest) for digest in change.digests]
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM}
        case CacheCleared():
            return {"type": "AllBlocksCleared"}


def kv_event_batch(batch: KvEventBatch) -> pb.KvEventBatch:
    """The message of a batch."""
    message = pb.KvEventBatch(sequence_number=batch.sequence, timestamp=batch.time, dp_rank=_RANK)
    for index, change in enumerate(batch.changes):
        event = message.events.add(event_id=((batch.sequence & 0xFFFFFFFF) << 32) | index)
        match change:
            case BlocksStored():
                _write_stored(event.stored, change)
            case BlocksRemoved():
                event.removed.block_hashes.extend(map(_signed, change.digests))
                event.removed.medium = _MEDIUM
            case CacheCleared():
                event.cleared.SetInParent()
    return message


def _write_stored(message: pb.KvBlocksStored, change: BlocksStored) -> None:
    size = change.block_size
    for index, digest in enumerate(change.digests):
        tokens = change.tokens[index * size : (index + 1) * size]
        message.blocks.add(block_hash=_signed(digest), token_ids=tokens, block_size=size)
    message.medium = _MEDIUM
    if change.parent is not None:
        message.parent_block_hash = _signed(change.parent)
    if change.salt:
        message.cache_salt = change.salt


def _signed(digest: bytes) -> int:
    """A block's number as an int64."""
    return int.from_bytes(digest[-8:], "big", signed=True)
