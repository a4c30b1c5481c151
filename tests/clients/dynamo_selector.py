"""Dynamo's selection service over workers whose KV events it follows (see tests/server/test_dynamo.py).

Arguments: each worker's endpoint and replay endpoint, and the size of their blocks. Reads prompts' token ids from
standard input, a JSON list a line, and answers each with the number of the worker that it selects, and how many blocks
of the prompt each worker has.
"""

import asyncio
import json
import sys

from dynamo._core import SelectionService  # pyright: ignore[reportMissingImports]


async def main(*endpoints: str, block_size: int) -> None:
    service = SelectionService()
    for number, (events, replay) in enumerate(zip(endpoints[::2], endpoints[1::2], strict=True)):
        worker = {"worker_id": number, "model_name": "tiny", "endpoint": f"http://{number}", "total_kv_blocks": 256}
        events_of_it = {"kv_events_endpoint": events, "replay_endpoint": replay, "block_size": block_size}
        await service.upsert_worker(worker | events_of_it)
    print(json.dumps("subscribed"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = {"model_name": "tiny", "token_ids": json.loads(line), "block_size": block_size}
        selected, scores = await service.select(request), await service.overlap_scores(request)
        print(json.dumps([selected, scores]), flush=True)
    service.shutdown()


asyncio.run(main(*sys.argv[1:-1], block_size=int(sys.argv[-1])))
