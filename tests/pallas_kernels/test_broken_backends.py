"""The conformance suite fails a backend that is broken in one way."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels.xla import XlaBackend


class Nearsighted(XlaBackend):
    """Attends as if each row were one token shorter."""

    def prepare(self, batch, shape, **options):
        meta = super().prepare(batch, shape, **options)
        return meta._replace(decodes=meta.decodes._replace(kv_len=meta.decodes.kv_len - 1))


class Farsighted(XlaBackend):
    """Sees one token more than its windows hold."""

    def attend(self, q, k, v, pool, meta, shape, *, window, **kw):
        wider = dataclasses.replace(shape, windows=tuple(each and each + 1 for each in shape.windows))
        return super().attend(q, k, v, pool, meta, wider, window=window and window + 1, **kw)


class Uncapped(XlaBackend):
    def attend(self, q, k, v, pool, meta, shape, **kw):
        return super().attend(q, k, v, pool, meta, dataclasses.replace(shape, soft_cap=None), **kw)


class Sinkless(XlaBackend):
    def attend(self, q, k, v, pool, meta, shape, *, sinks, **kw):
        return super().attend(q, k, v, pool, meta, shape, **kw)


class Unscaled(XlaBackend):
    """Forgets the scales of the keys it wrote."""

    def attend(self, q, k, v, pool, meta, shape, **kw):
        out, pool = super().attend(q, k, v, pool, meta, shape, **kw)
        return out, pool._replace(key_scales=jnp.ones_like(pool.key_scales))


@pytest.mark.parametrize(
    ("broken", "model"),
    [
        (Nearsighted(), {}),
        (Unscaled(), {"pool": "int8"}),
        (Farsighted(), {"windows": "blocks"}),
        (Uncapped(), {"soft_cap": 1.0}),
        (Sinkless(), {"sinks": True}),
    ],
)
def test_a_broken_backend_is_caught(harness, broken, model):
    h = harness(broken, **model)
    with pytest.raises(AssertionError, match="--seed"):
        h.check_mixed_iterations()
