"""The queue of those who wait."""

from __future__ import annotations

from jaxserve.scheduler.waiting import WaitingQueue


def test_the_queue_removes_from_the_middle_and_keeps_count():
    class Entry:
        def __init__(self, key):
            self.key, self.tokens = (float(key), key), [0] * 3

    queue: WaitingQueue[Entry] = WaitingQueue()
    entries = [Entry(k) for k in range(1000)]
    for entry in reversed(entries):
        queue.push(entry)
    for entry in entries[:990]:
        queue.remove(entry)
    assert (len(queue), queue.num_tokens) == (10, 30)
    assert len(queue._heap) < 200  # those removed do not pile up
    assert queue.first() is entries[990]
    assert queue.pop() is entries[990]
    queue.push(entries[990])
    assert [queue.pop() for _ in range(10) if queue.first()] == entries[990:]
    assert queue.first() is None
    assert (len(queue), queue.num_tokens) == (0, 0)
