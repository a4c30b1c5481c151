"""The TPU kernels for experts in an interpreter that knows of copies, against a loop over tokens in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import grouped, routing
from pallas_kernels.tpu.grouped import Stack
from pallas_kernels.tpu.visits import Visits

# Copies take place when they are waited for, and what nobody wrote is NaN.
LATE = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
WATCHED = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True, uninitialized_memory="nan")


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


class Layer:
    """A layer's experts, with logits of which many are equal, and its tokens; some are padding."""

    def __init__(
        self, tokens=200, experts=8, hidden=64, inner=96, *, dtype="float32", narrow=False, bias=False, seed=0
    ):
        rng = np.random.default_rng(seed)
        self.experts, self.dtype = experts, jnp.dtype(dtype)
        self.x = rng.integers(-2, 3, (tokens, hidden)).astype(dtype)
        self.positions = np.arange(tokens, dtype=np.int32)
        self.positions[[3, tokens - 1]] = -1
        kernel = (rng.integers(-1, 2, (experts, hidden)) * 2.0**-3).astype(dtype)
        self.router = routing.Router(kernel, np.float32(rng.integers(-8, 9, experts) / 8) if bias else None)
        self.stacks = tuple(
            self._stack(rng, shape, narrow, bias) for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
        )

    def _stack(self, rng, shape, narrow, bias):
        values = rng.standard_normal((self.experts, *shape)) / np.sqrt(shape[1])
        biases = rng.standard_normal((self.experts, shape[0])).astype(np.float32) if bias else None
        if not narrow:
            return Stack(values.astype(self.dtype), None, biases)
        scales = np.abs(values).max(2).astype(np.float32) / 127
        return Stack(np.round(values / scales[:, :, None]).astype(np.int8), scales, biases)

    def logits(self):
        logits = self.x.astype(np.float64) @ self.router.kernel.astype(np.float64).T
        return logits if self.router.bias is None else logits + self.router.bias

    def expected(self, per_token, add_up=True, here=slice(None), parts=1):
        """What the experts `here` give each token, in float64."""
        logits, y = self.logits(), np.zeros(self.x.shape)
        for token, own in enumerate(logits):
            if self.positions[token] < 0:
                continue
            chosen = np.argsort(-own, kind="stable")[:per_token]
            each = np.exp(own - own.max())
            for expert in chosen:
                if expert in range(*here.indices(self.experts)):
                    weight = each[expert] / (each[chosen] if add_up else each).sum()
                    y[token] += weight * self.of_expert(expert, self.x[token].astype(np.float64), parts)
        return y

    def of_expert(self, expert, x, parts):
        def product(stack, x, share=1.0):
            kernel = stack.values[expert].astype(np.float64)
            y = (kernel if stack.scales is None else kernel * stack.scales[expert][:, None]) @ x
            return y if stack.bias is None else y + share * stack.bias[expert]

        gate, up, down = self.stacks
        inner = product(gate, x)
        return product(down, inner / (1 + np.exp(-inner)) * product(up, x), 1 / parts)

    def served(
        self,
        per_token,
        add_up=True,
        here=slice(None),
        *,
        parts=1,
        kind="TPU v5 lite",
        interpret=LATE,
        dtype=jnp.float32,
    ):
        """What the kernels make of it."""
        stacks = jax.tree.map(lambda leaf: jnp.asarray(leaf[here]), self.stacks)
        sizes = len(self.x), per_token, *self.stacks[2].values.shape[1:], (self.dtype, self.stacks[0].values.dtype)
        assert grouped.supports(*sizes, kind)
        given = jax.tree.map(jnp.asarray, (self.x, self.positions, self.router, np.int32([here.start or 0])))
        settings = {"per_token": per_token, "add_up": add_up, "parts": parts, "dtype": dtype, "device_kind": kind}
        return np.asarray(grouped.mixture(*given, *stacks, activation=gated, interpret=interpret, **settings))


def check(layer, *args, atol=1e-4, **kwargs):
    expected = layer.expected(
        *args, **{name: value for name, value in kwargs.items() if name not in ("kind", "interpret")}
    )
    found = layer.served(*args, **kwargs)
    np.testing.assert_allclose(found, expected, atol=atol)
    np.testing.assert_array_equal(found[layer.positions < 0], 0)


@pytest.mark.parametrize(
    ("sizes", "per_token", "add_up", "kind"),
    [
        ({}, 2, True, "TPU v5 lite"),
        *(
            pytest.param(*case, marks=pytest.mark.interpret)
            for case in [
                ({"bias": True}, 4, False, "TPU v6 lite"),
                ({"tokens": 384, "experts": 5}, 1, True, "TPU v6 lite"),  # a few rows of a last tile
                ({"tokens": 129, "experts": 40, "inner": 360}, 8, True, "TPU v4"),  # most tiles have several experts
                ({"hidden": 300, "inner": 520, "bias": True}, 2, True, "TPU v5 lite"),  # no whole lane tiles
            ]
        ),
        # So few that an expert multiplies all of them.
        ({"tokens": 5, "bias": True}, 2, False, "TPU v5 lite"),
        *(
            pytest.param(*case, marks=pytest.mark.interpret)
            for case in [
                ({"tokens": 200}, 2, True, "TPU v6 lite"),  # they choose in two steps
                ({"tokens": 16, "experts": 140, "hidden": 300, "inner": 520}, 8, True, "TPU v5 lite"),
                ({"tokens": 24, "experts": 1}, 1, True, "TPU v4"),
            ]
        ),
    ],
)
def test_tokens_get_what_their_experts_give(sizes, per_token, add_up, kind):
    check(Layer(**sizes), per_token, add_up, kind=kind)


@pytest.mark.parametrize("tokens", [16, pytest.param(200, marks=pytest.mark.interpret)])
@pytest.mark.parametrize("narrow", [False, pytest.param(True, marks=pytest.mark.interpret)])
def test_bfloat16_and_int8(narrow, tokens):
    """Products of int8 values are exact; results and inner states are rounded to bfloat16."""
    check(Layer(tokens, dtype="bfloat16", narrow=narrow, bias=True), 2, atol=0.06)


def test_the_dtype_of_the_result():
    """Sums are rounded once, of results that are rounded too: a sum of one stays as it is."""
    layer = Layer(tokens=16, dtype="bfloat16")
    one = layer.served(1)
    np.testing.assert_array_equal(one, one.astype(layer.dtype))
    wide, narrow = (layer.served(2, dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16))
    np.testing.assert_array_equal(wide.astype(narrow.dtype), narrow)
    assert narrow.dtype == jnp.bfloat16


@pytest.mark.parametrize("tokens", [20, pytest.param(130, marks=pytest.mark.interpret)])
def test_an_expert_elsewhere_adds_nothing(tokens):
    """Each device adds the shares of its experts; where none was chosen, zeros."""
    layer = Layer(tokens, bias=True)
    layer.router = layer.router._replace(bias=np.float32([0, 0, 0, 0, 0, 0, -99, -99]))
    for here in (slice(0, 4), slice(4, 6), slice(6, 8)):
        check(layer, 2, here=here)
    assert not layer.served(2, here=slice(6, 8)).any()


@pytest.mark.parametrize("tokens", [20, pytest.param(130, marks=pytest.mark.interpret)])
def test_biases_of_parts_add_up(tokens):
    """With an expert's inner state over several devices, the bias of the last projection is divided."""
    layer = Layer(tokens, bias=True)
    check(layer, 2, parts=4)
    assert np.abs(layer.served(2, parts=4) - layer.served(2)).max() > 0.1


@pytest.mark.parametrize("tokens", [20, 200])
@pytest.mark.interpret
def test_blocks_of_columns(tokens, monkeypatch):
    """Columns take several blocks, of which the last is not full, and blocks several steps."""
    monkeypatch.setattr(grouped, "_MOST_BYTES", 8 * 2**20)
    monkeypatch.setattr(grouped, "_STEP", 2**18)
    layer = Layer(tokens, hidden=900, inner=640)
    dtypes, kind = (layer.dtype, layer.dtype), "TPU v5 lite"
    assert grouped.blocks(900, 640, 2, dtypes, kind) == (256, 256)
    assert grouped.blocks(640, 900, 1, dtypes, kind) == (1024, 512)
    grouped._multiply.clear_cache()
    try:
        check(layer, 2)
    finally:
        grouped._multiply.clear_cache()


@pytest.mark.parametrize("tokens", [128, 256])
def test_a_token_does_not_depend_on_the_others(tokens):
    """To the bit; also where another's states are not finite, which choose no expert."""
    layer, other = Layer(tokens), tokens - 56
    alone = layer.served(2)
    layer.x[1:] = np.nan
    layer.x[other], layer.x[20:30] = layer.x[0], np.inf
    among = layer.served(2)
    np.testing.assert_array_equal(among[0], alone[0])
    np.testing.assert_array_equal(among[other], alone[0])
    np.testing.assert_array_equal(np.delete(among, [0, other], axis=0), 0)


@pytest.mark.interpret
def test_all_tokens_choose_the_same():
    layer = Layer(tokens=300, bias=True)
    layer.router = layer.router._replace(bias=np.float32([0, 50, 0, 0, 0, 0, 49, 0]))
    check(layer, 2, atol=1e-3)


@pytest.mark.parametrize("tokens", [20, 130])
@pytest.mark.interpret
def test_no_races(tokens, capfd):
    check(Layer(tokens), 2, interpret=WATCHED)
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_choices_are_sorted_by_expert(seed):
    """Rows are a permutation, an expert's follow one another, and the visits cover them once and clear the rest."""
    rng = np.random.default_rng(seed)
    for tokens, experts, per_token, first, count, tile in ((256, 8, 2, 0, 8, 128), (140, 32, 4, 8, 8, 16)):
        layer = Layer(tokens, experts, seed=int(rng.integers(99)))
        routes = jax.jit(
            partial(routing.route, per_token=per_token, count=count, tile=tile, add_up=True, interpret=LATE)
        )(layer.x, layer.positions, layer.router, np.int32([first]))
        padded = -(-tokens // 128) * 128
        rows, at = np.asarray(routes.rows), np.tile(np.arange(padded), per_token)
        np.testing.assert_array_equal(np.sort(rows), np.arange(per_token * padded))
        np.testing.assert_array_equal(np.asarray(routes.tokens)[rows], np.minimum(at, tokens - 1))
        chosen = np.argsort(-layer.logits(), axis=1, kind="stable")[:, :per_token]
        chosen = np.where(layer.positions[:, None] < 0, -1, chosen)
        chosen = np.pad(chosen, ((0, padded - tokens), (0, 0)), constant_values=-1).T.reshape(-1)
        visits = Visits(np.asarray(routes.visits), count)
        covered = [(visits.expert(i), visits.tile(i)) for i in range(visits.used)]
        expected = []
        for expert in range(count):
            begin, end = visits.rows_of(expert)
            np.testing.assert_array_equal(np.sort(rows[chosen == first + expert]), np.arange(begin, end))
            expected += [(expert, i) for i in range(begin // tile, -(-end // tile)) if end > begin]
        assert covered == expected
        tiles = {visits.tile(i) for i in range(visits.most)}
        assert tiles == set(range(per_token * padded // tile))


def test_what_does_not_fit_is_refused():
    """Too many choices for scalar memory, kernels of which no block fits, dtypes that are not widened."""
    served = partial(grouped.supports, 1024, 2, 4096, 1792, device_kind="TPU v4")
    bfloat16, int8, float8 = (np.dtype(each) for each in (jnp.bfloat16, np.int8, jnp.float8_e4m3fn))
    assert served(dtypes=(bfloat16, bfloat16))
    assert served(dtypes=(bfloat16, int8))
    assert not served(dtypes=(bfloat16, float8))
    assert not grouped.supports(1024, 2, 4096, 14336, (bfloat16, bfloat16), "TPU v4")
    assert grouped.supports(1024, 2, 4096, 14336, (bfloat16, bfloat16), "TPU v6 lite")
    assert routing.supports(8192, 8)
    assert not routing.supports(8193, 8)
