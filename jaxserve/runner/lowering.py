"""Lowers a stage's programs without arrays, for the engine's devices or a topology."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered

from jaxserve import weights
from jaxserve.iteration import SamplerVariant
from jaxserve.models import Model, Params, products
from jaxserve.runner import attention, batch, block_copies, kv_cache, matmul, rings, row_parts, weight_parts
from jaxserve.runner.batch import RowState
from jaxserve.runner.programs import Forward, StageShape, choose, feed, forward, head, pool, score
from sharding.spec import ShardingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrograms:
    """The programs of the layers that one sub-mesh owns.

    Attributes:
      layers: the stage's layers. The first stage also embeds; the last also has the head and the sampler.
      mesh: the stage's devices, or those of a topology.
      spec: the sharding of parameters and pool.
      platform: of the devices, which decides the layouts of parameters.
      quantize: how matrices are held (`narrow.format_of`).
    """

    model: Model
    shape: StageShape
    layers: range
    mesh: Mesh
    spec: ShardingSpec
    platform: str
    quantize: str | None

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.model.config.num_layers

    def made_from(self) -> str:
        """A key of everything but code and devices that determines the programs."""
        spec, shape = self.spec, self.shape
        sizes = {field.name: getattr(shape, field.name) for field in fields(shape)}
        # Objects are replaced by what identifies them, since their repr differs between processes.
        sizes |= {"backend": shape.backend.name, "product": matmul.product_key(shape.product)}
        if shape.groups.count == 1:  # the sizes of other groups depend on rows and buckets
            sizes["groups"] = shape.max_context
        return repr(
            (
                (self.model.config, self.model.padded_config, self.layers, self.quantize),
                sizes,
                (spec.rules, spec.parameters, spec.activations, spec.pool, spec.gather, sorted(spec.pad)),
                (self.mesh.axis_names, self.mesh.axis_types, self.mesh.devices.shape),
            )
        )

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of an array that every device of the stage holds whole."""
        return NamedSharding(self.mesh, self.spec.resolve((), (), self.mesh))

    @property
    def place(self) -> weights.Place:
        """Where the stage's devices hold a parameter."""
        return weights.on_mesh(self.model, self.mesh, self.spec, self.platform)

    def params(self) -> Params:
        """The stage's parameters: shapes with shardings and layouts.

        Raises ValueError where the spec does not fit them.
        """
        dtype = self.shape.attention.dtype
        return self.model.part(weights.describe(self.model, dtype, self.place, quantize=self.quantize), self.layers)

    @property
    def looped(self) -> bool:
        """Whether the layers are compiled as one loop (`Model.layers`)."""
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        config = self.model.config
        return on_cpu and self.mesh.size == 1 and config.layers_alike and not config.num_experts

    def taken(self, params: Params, stack: Callable[[Sequence[Any]], Any]) -> Params:
        """The stage's parameters as `lower_forward` takes them.

        Those of looped layers are `products.stacked`.
        """
        if not self.looped:
            return params
        return {**params, "layers": products.stacked([params["layers"][i] for i in self.layers], stack)}

    def first_blocks(self, n_blocks: int) -> list[int]:
        """First block of each of the stage's layers in a part of the pool, and the blocks there.

        Args:
          n_blocks: blocks of the first cache group, in all parts.
        """
        blocks = self.part_blocks(n_blocks)
        return list(accumulate((blocks[group] for group in self._groups), initial=0))

    def part_blocks(self, n_blocks: int) -> tuple[int, ...]:
        """Blocks of each cache group in a part of the pool's rows."""
        parts = kv_cache.row_parts(self.mesh, self.spec)
        return tuple(each // parts for each in self.shape.groups.blocks(n_blocks))

    def first_blocks_of(self, group: int, n_blocks: int) -> list[int]:
        """First block in the pool of each of the stage's layers in a cache group."""
        layers = zip(self.first_blocks(n_blocks), self._groups, strict=False)
        return [first for first, each in layers if each == group]

    @property
    def _groups(self) -> list[int]:
        """The cache group of each of the stage's layers."""
        return [self.shape.groups.index(self.model.config.window(layer)) for layer in self.layers]

    def pool(self, n_blocks: int) -> Any:
        """The pool of the stage's layers, n_blocks in the first cache group: shapes with shardings."""
        shape, total = self.shape, self.first_blocks(n_blocks)[-1]
        return kv_cache.pool(shape.backend, shape.attention, total, self.mesh, self.spec)

    def pool_bytes(self, n_blocks: int) -> int:
        """Bytes of that pool on each device."""
        return kv_cache.pool_bytes(self.shape.backend, self.shape.attention, self.first_blocks(n_blocks)[-1])

    def state(self) -> RowState:
        """The state of the rows: shapes with shardings."""
        layout = self.shape.layout(1)
        state = jax.eval_shape(partial(batch.empty_state, layout, is_first=self.is_first, is_last=self.is_last))
        return jax.tree.map(lambda leaf: self._whole(leaf.shape, leaf.dtype), state)

    def hidden(self, bucket: int) -> jax.ShapeDtypeStruct:
        """The hidden states that pass over a link: [T, H]."""
        return self._whole((bucket, self.model.config.hidden_size), self.shape.attention.dtype)

    def between_layers(self, bucket: int) -> NamedSharding:
        """The sharding of hidden states [T, H] between the layers.

        Raises ValueError where they do not divide.
        """
        axes, shape = ("tokens", "embed"), self.hidden(bucket).shape
        name = f"hidden states of {bucket} tokens"
        return NamedSharding(self.mesh, self.spec.resolve(axes, shape, self.mesh, name=name, section="activations"))

    def gathered(self, layers: Any) -> Any:
        """Layers' parameters with the parts over the spec's axes of `gather` joined. Traced."""
        shardings = jax.tree.map(
            lambda leaf: NamedSharding(self.mesh, self.spec.gathered(leaf.sharding.spec)), self.params()["layers"]
        )
        return jax.lax.with_sharding_constraint(layers, shardings)

    def divided(self, layers: Any) -> Any:
        """Layers' bound weights, with products that the compiler would divide badly. Traced."""
        given = self.params()["layers"], self.mesh, self.spec, self.platform
        return rings.around(weight_parts.divided(layers, *given), *given)

    def lower_forward(self, bucket: int, n_blocks: int, decodes_only: bool = False) -> Lowered:
        """One iteration of the stage's layers.

        Its arguments are (`taken` params, pool, tables, history, packed, x).

        Args:
          decodes_only: whether no chunk is longer than one token.
        """
        layout, state, pool = self.shape.layout(bucket), self.state(), self.pool(n_blocks)
        attended = (self.shape.backend, self.shape.attention, self.mesh, self.spec)
        prepare = partial(attention.prepare, *attended, decodes_only=decodes_only or bucket == 1)
        blocks = self.part_blocks(n_blocks)
        between = partial(jax.lax.with_sharding_constraint, shardings=self.between_layers(bucket))
        whole = partial(jax.lax.with_sharding_constraint, shardings=self.everywhere)
        # Compilers for GPUs would widen the last gather to float32.
        by_tokens = kv_cache.over(self.mesh, self.spec.activations.get("tokens")) and self.platform != "gpu"
        is_ring = bool(rings.ring_axes(self.mesh, self.spec, self.platform))
        step = partial(
            forward,
            model=self.model,
            shape=self.shape,
            layers=self.layers,
            looped=self.looped,
            products=matmul.DeviceProducts(
                native=self.shape.product,
                tiles=self.looped,
                device_kind=self.shape.attention.device_kind,
                mesh=self.mesh,
                spec=self.spec,
            ),
            prepare=lambda batch, group: prepare(batch, blocks=blocks[group]),
            make_attend=partial(attention.make_attend, self.model, *attended),
            between=between if self.spec.activations else None,
            whole=whole if by_tokens or (is_ring and self.platform != "gpu") else None,
            gathered=self.gathered if self.spec.gather and not self.looped else None,
            divided=self.divided if is_ring or weight_parts.needed(self.params()["layers"], self.platform) else None,
            layout=layout,
            first_blocks=self.first_blocks(n_blocks),
        )
        kept = jax.tree.map(lambda leaf: leaf.sharding, pool)
        rest = self.everywhere
        # Unused parameters (the head's) are kept, so that the argument size is all that the stage holds.
        layers = jax.jit(
            step, donate_argnums=(1, 2), keep_unused=True, out_shardings=Forward._make((kept, *[rest] * 5))
        )
        return layers.lower(
            self.taken(self.params(), lambda vectors: self._whole((len(vectors), *vectors[0].shape), vectors[0].dtype)),
            pool,
            state.tables,
            state.history,
            self._whole((layout.size,), jnp.int32),
            None if self.is_first else self.hidden(bucket),
        )

    def lower_score(self, bucket: int) -> Lowered:
        """Prompt scoring by the last stage; arguments (ends, hidden, next_tokens)."""
        step = jax.jit(partial(score, self.model, self.mesh, self.spec), out_shardings=self.everywhere)
        return step.lower(ends(self.params()), self.hidden(bucket), self._whole((bucket,), jnp.int32))

    def lower_pool(self, bucket: int) -> Lowered:
        """Sums of embeddings by the last stage; arguments (ends, hidden, owners)."""
        step = jax.jit(partial(pool, self.model, self.shape.max_rows), out_shardings=self.everywhere)
        return step.lower(ends(self.params()), self.hidden(bucket), self._whole((bucket,), jnp.int32))

    def lower_head(self, points: int) -> Lowered:
        """Logits at the first sample positions, in the last stage; arguments (ends, last)."""
        step = jax.jit(partial(head, self.model, self.shape.product, points), out_shardings=self.everywhere)
        return step.lower(ends(self.params()), self.hidden(self.shape.points))

    def lower_choose(self, points: int, variant: SamplerVariant) -> Lowered:
        """Sampling in the last stage; arguments (logits, sampling, history, points).

        With SamplerVariant.CONSTRAINED the grammar masks come last.
        """
        state = self.state()
        step = jax.jit(partial(choose, variant), donate_argnums=2, out_shardings=self.everywhere)
        constrained = variant is SamplerVariant.CONSTRAINED
        return step.lower(
            self._whole((points, self.model.config.vocab_size), jnp.float32),
            state.sampling,
            state.history,
            self._whole((self.shape.points, 3), jnp.int32),
            *((self._whole((points, self.mask_words), jnp.uint32),) if constrained else ()),
        )

    @property
    def mask_words(self) -> int:
        """32-bit words of a grammar mask, which has a bit for every token."""
        return -(-self.model.config.vocab_size // 32)

    def lower_admit(self) -> Lowered:
        """Writes an admitted request into its row; arguments (state, packed)."""
        layout = self.shape.layout(1)
        step = jax.jit(partial(batch.admit, layout=layout), donate_argnums=0, out_shardings=self.everywhere)
        return step.lower(self.state(), self._whole((batch.admission_size(layout),), jnp.int32))

    def lower_feed(self, points: int) -> Lowered:
        """Writes sampled tokens to the first stage; arguments (history, points, chosen)."""
        step = jax.jit(feed, donate_argnums=0, out_shardings=self.everywhere)
        return step.lower(
            self.state().history, self._whole((self.shape.points, 3), jnp.int32), self._whole((2, points), jnp.int32)
        )

    def lower_draft(self) -> Lowered:
        """Writes drafted tokens to the first and the last stage; arguments (history, drafts)."""
        step = jax.jit(batch.write_drafts, donate_argnums=0, out_shardings=self.everywhere)
        return step.lower(self.state().history, self._whole((self.shape.layout(1).drafts, 3), jnp.int32))

    @property
    def _in_turn(self) -> bool:
        """Whether blocks are written one after the other; see `kv_cache.write_blocks`."""
        return self.platform == "tpu" and self.shape.attention.pool_dtype == jnp.int8

    def lower_copy(self, n_blocks: int) -> Lowered:
        """Copies blocks in all of the stage's layers; arguments (pool, copies)."""
        pool, groups = self.pool(n_blocks), range(self.shape.groups.count)
        first_blocks = [self.first_blocks_of(each, n_blocks) for each in groups]
        copy = partial(kv_cache.copy_blocks, first_blocks=first_blocks, in_turn=self._in_turn)
        if kv_cache.row_parts(self.mesh, self.spec) > 1:
            copy = self._in_every_part(copy, pool, self.part_blocks(n_blocks))
        kept = jax.tree.map(lambda leaf: leaf.sharding, pool)
        step = jax.jit(copy, donate_argnums=0, out_shardings=kept)
        return step.lower(pool, self._whole((len(groups) * self.shape.max_rows, 2), jnp.int32))

    def _in_every_part(self, copy: Callable[..., Any], pool: Any, blocks: Sequence[int]) -> Callable[..., Any]:
        """Block copies on devices that have a part of the pool: `blocks` of each cache group."""
        split, axes = jax.tree.map(lambda leaf: leaf.sharding.spec, pool), kv_cache.row_axes(self.mesh, self.spec)

        def copy_here(pool: Any, copies: jax.Array) -> Any:
            sizes = jnp.resize(jnp.array(blocks, jnp.int32), (len(copies),))  # the groups alternate
            return copy(pool, row_parts.copies_of_part(copies, jax.lax.axis_index(axes), sizes[:, None]))

        return jax.shard_map(
            copy_here, mesh=self.mesh, in_specs=(split, self.everywhere.spec), out_specs=split, check_vma=False
        )

    def host_block(self, group: int, n_blocks: int) -> block_copies.HostBlock:
        """A block of a cache group outside the pool: shapes with shardings."""
        layers = len(self.first_blocks_of(group, n_blocks))
        data = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((layers, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding),
            self.pool(n_blocks),
        )
        return block_copies.HostBlock(data, self._whole((2,), jnp.uint32))

    def lower_store(self, group: int, n_blocks: int) -> Lowered:
        """Copies blocks out of the pool; arguments (pool, blocks)."""
        copy = partial(block_copies.store, first_blocks=self.first_blocks_of(group, n_blocks))
        placed = jax.tree.map(lambda leaf: leaf.sharding, self.host_block(group, n_blocks))
        step = jax.jit(copy, out_shardings=(placed,) * block_copies.COUNT)
        return step.lower(self.pool(n_blocks), self._whole((block_copies.COUNT,), jnp.int32))

    def lower_load(self, group: int, n_blocks: int) -> Lowered:
        """Copies blocks into the pool; arguments (pool, blocks, held)."""
        pool, held = self.pool(n_blocks), self.host_block(group, n_blocks)
        copy = partial(block_copies.load, first_blocks=self.first_blocks_of(group, n_blocks), in_turn=self._in_turn)
        kept = jax.tree.map(lambda leaf: leaf.sharding, pool)
        step = jax.jit(copy, donate_argnums=0, out_shardings=(kept, self.everywhere))
        return step.lower(pool, self._whole((block_copies.COUNT,), jnp.int32), (held,) * block_copies.COUNT)

    def _whole(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.everywhere)


def temporaries(*programs: jax.stages.Compiled) -> int:
    """Peak bytes on a device beside the arguments, of programs that run one after the other.

    A program needs its temporaries while it runs; its outputs stay.
    """
    most = left = 0
    for program in programs:
        memory = program.memory_analysis()
        assert memory is not None
        left += max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
        most = max(most, left + memory.temp_size_in_bytes)
    return most


def ends(params: Params) -> Params:
    """The parameters of a stage outside its layers."""
    return {name: part for name, part in params.items() if name != "layers"}
