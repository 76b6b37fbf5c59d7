"""Paged attention on Hopper: a warpgroup that computes, with an online softmax in float32.

It issues the scores of step i and the weighted values of step i - 1 together, and works on the softmax of step i while
the tensor cores finish the latter. Two of them take turns at issuing, so that one's softmax runs beside the other's
products.

What a row adds up, and in which order, follows from positions alone: steps and chunks are anchored at position 0.
Neither the row's place in a block, nor the block's other rows, nor the rest of the batch enter.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from penelope_jax.kernels.hopper_geometry import ROWS, STEP, Geometry, WorkItem

_MASKED = -1e30  # finite: the difference of two masked scores is not NaN


class Turns:
    """Whose turn it is to issue products, where two warpgroups compute."""

    def __init__(self, geometry: Geometry, warpgroup: jax.Array, scratch: dict[str, Any]):
        self.two = geometry.warpgroups == 2
        self.warpgroup = warpgroup
        self.barriers: Any = scratch.get("turns")

    def start(self):
        """Gives warpgroup 0 the first turn."""
        if self.two:
            pl.when(self.warpgroup == 1)(self.give)

    def finish(self):
        """Takes the turn that is left."""
        if self.two:
            pl.when(self.warpgroup == 0)(self.take)

    def take(self):
        if self.two:
            plgpu.barrier_wait(self.barriers.at[self.warpgroup])

    def give(self):
        if self.two:
            plgpu.barrier_arrive(self.barriers.at[1 - self.warpgroup])


class RowsOfItem:
    """A warpgroup's rows of one item."""

    def __init__(
        self,
        geometry: Geometry,
        warpgroup: jax.Array,
        turns: Turns,
        outs: tuple,
        scratch: dict[str, Any],
        item: WorkItem,
        head: jax.Array,
        number: jax.Array | int,
        ring: jax.Array | int,
    ):
        self.geometry = geometry
        self.warpgroup = warpgroup
        self.turns = turns
        self.outs = outs
        self.scratch = scratch
        self.item = item
        self.out_index = item.block * geometry.num_kv_heads + head
        self.limit = item.limit + ROWS * warpgroup  # row r stands at position (limit + r) // group
        self.slot = lax.rem(number, geometry.query_slots) if geometry.split else 0
        self.queries = scratch["queries_smem"].at[self.slot * geometry.warpgroups + warpgroup]
        self.ring = ring

    def attend(self):
        """Attends the rows to the item's steps and stores the result."""
        first, end = self.item.first_step, self.item.end_step
        plgpu.barrier_wait(self.scratch["queries_full"].at[self.slot])
        carry = self._start()
        # Steps that end at or before the first row's position need no mask; the first one always takes it.
        masked_from = lax.div(lax.div(self.limit, self.geometry.group) + 1, STEP)
        masked_from = jnp.clip(masked_from, first + 1, end)
        carry = lax.fori_loop(first + 1, masked_from, functools.partial(self._advance, masked=False), carry)
        carry = lax.fori_loop(masked_from, end, functools.partial(self._advance, masked=True), carry)
        self._store(*self._end(*carry))
        if self.geometry.split:
            plgpu.barrier_arrive(self.scratch["queries_free"].at[self.slot])

    def _stage(self, step):
        return lax.rem(self.ring + step - self.item.first_step, self.geometry.stages)

    def _wait(self, name: str, step):
        plgpu.barrier_wait(self.scratch[f"{name}_full"].at[self._stage(step)])

    def _free(self, name: str, step):
        plgpu.barrier_arrive(self.scratch[f"{name}_free"].at[self._stage(step)])

    def _loaded(self, name: str, step):
        """Returns keys or values of a step, in shared memory."""
        ref = self.scratch[f"{name}_smem"].at[self._stage(step)]
        if self.geometry.simulated:
            # The interpreter does not check what wgmma reads for races, but what is loaded.
            plgpu.load(ref)
            plgpu.commit_smem()
        return ref

    def _wait_for_next_keys(self, step):
        pl.when(step + 1 < self.item.end_step)(lambda: self._wait("keys", step + 1))

    def _mask(self, scores, step):
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        last_key = lax.div(self.limit + row, self.geometry.group) - step * STEP
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(key <= along_rows(last_key, scores.shape), scores, _MASKED)

    def _weigh(self, scores, row_max):
        return jnp.exp2(scores * self.geometry.scale_log2 - along_rows(row_max, scores.shape))

    def _start(self):
        """Computes the first step's weights. Returns (weights, row maxima, row sums, sums of weighted values)."""
        step = self.item.first_step
        self._wait("keys", step)
        self.turns.take()

        def multiply(scores_ref):
            plgpu.wgmma(scores_ref, self.queries, self._loaded("keys", step).transpose((1, 0)))
            self.turns.give()
            return scores_ref[...]

        scores = self._mask(pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, STEP))), step)
        self._free("keys", step)
        row_max = scores.max(axis=1) * self.geometry.scale_log2
        weights = self._weigh(scores, row_max)
        sums = plgpu.layout_cast(jnp.zeros((ROWS, self.geometry.head_dim), jnp.float32), plgpu.Layout.WGMMA)
        self._wait_for_next_keys(step)
        return weights.astype(self.geometry.dtype), row_max, weights.sum(axis=1), sums

    def _advance(self, step, carry, *, masked: bool):
        """Adds the previous step's weighted values and computes the weights of `step`, whose keys are there."""
        weights, row_max, row_sum, sums = carry
        self._wait("values", step - 1)
        self.turns.take()

        def multiply(sums_ref, operand):
            def with_scores(scores_ref):
                plgpu.wgmma(scores_ref, self.queries, self._loaded("keys", step).transpose((1, 0)))
                plgpu.wgmma(sums_ref, operand, self._loaded("values", step - 1))
                self.turns.give()
                scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)  # the other product goes on
                self._free("keys", step)
                if masked:
                    scores = self._mask(scores, step)
                new_max = jnp.maximum(row_max, scores.max(axis=1) * self.geometry.scale_log2)
                new_weights = self._weigh(scores, new_max)
                keep = jnp.exp2(row_max - new_max)
                new_sum = row_sum * keep + new_weights.sum(axis=1)
                # The wait ends a basic block. Without it ptxas moves all of the above behind the product's end.
                self._wait_for_next_keys(step)
                return new_weights, new_max, new_sum, keep

            return pl.run_scoped(with_scores, plgpu.WGMMAAccumulatorRef((ROWS, STEP)))

        like = (weights.astype(jnp.float32), row_max, row_sum, row_max)
        sums, new_weights, row_max, row_sum, keep = self._add_product(sums, weights, multiply, like)
        self._free("values", step - 1)
        # Not before the product has ended: the new operand takes the registers of the old one, which it reads.
        new_weights = lax.optimization_barrier(new_weights)
        weights = lax.optimization_barrier(new_weights.astype(self.geometry.dtype))
        return weights, row_max, row_sum, sums * along_rows(keep, sums.shape)

    def _end(self, weights, row_max, row_sum, sums):
        """Adds the last step's weighted values, without what stands behind the last valid position.

        That may be anything, NaN too, and 0 * NaN is NaN. The warpgroups share the values, so each writes clean ones
        over its queries, which it no longer needs, half a step at a time.
        """
        step = self.item.end_step - 1
        last_key = self.item.last_position - step * STEP
        self._wait("values", step)
        for start in range(0, STEP, ROWS):
            values = plgpu.load(self._loaded("values", step).at[pl.ds(start, ROWS)], layout=plgpu.Layout.WGMMA)
            key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
            self.queries[...] = jnp.where(key + start <= last_key, values, jnp.zeros_like(values))
            plgpu.commit_smem()

            def multiply(sums_ref, operand):
                plgpu.wgmma(sums_ref, operand, self.queries)
                return ()

            (sums,) = self._add_product(sums, weights[:, start : start + ROWS], multiply, ())
        self._free("values", step)
        return row_max, row_sum, sums

    def _add_product(self, sums, weights, multiply: Callable, like: tuple) -> Any:
        """Adds a product of the weights to an accumulator.

        Args:
            sums: f32[64, H].
            weights: [64, keys].
            multiply: called with an accumulator and the weights as an operand (registers, or for the interpreter shared
                memory), issues the product and returns arrays.
            like: arrays of the types that `multiply` returns.

        Returns:
            The new sums, and what `multiply` returned.
        """
        if self.geometry.simulated:
            operand = self.scratch["weights_smem"].at[self.warpgroup, :, pl.ds(0, weights.shape[1])]
            operand[...] = weights
            plgpu.commit_smem()

            def from_zero(sums_ref):
                returned = multiply(sums_ref, operand)
                return sums + sums_ref[...], *returned

            return pl.run_scoped(from_zero, plgpu.WGMMAAccumulatorRef(sums.shape))

        def in_place(refs):
            sums_ref, *returned_refs = refs
            for ref, value in zip(returned_refs, multiply(sums_ref, weights), strict=True):
                ref[...] = value

        return pl.run_state(in_place)((plgpu.WGMMAAccumulatorRef.init(sums), *like))

    def _store(self, row_max, row_sum, sums):
        """Stores the item's result. Without a split the queries, no longer needed, are the way out."""
        geometry = self.geometry
        if geometry.split:
            sums_out, stats_out = self.outs
            sums_smem, stats_smem = self.scratch["sums_smem"], self.scratch["stats_smem"]
            part = self.out_index * geometry.num_chunks + self.item.chunk
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before
            sums_smem[...] = sums
            stats_smem[0] = row_max
            stats_smem[1] = row_sum
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sums_smem.at[pl.ds(0, geometry.rows)], sums_out.at[part])
            plgpu.copy_smem_to_gmem(stats_smem, stats_out.at[part])
        else:
            (out,) = self.outs
            self.queries[...] = (sums / along_rows(row_sum, sums.shape)).astype(geometry.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                self.queries.at[pl.ds(0, geometry.rows)],
                out.at[self.out_index, pl.ds(ROWS * self.warpgroup, geometry.rows)],
            )


def along_rows(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one value a row."""
    return lax.broadcast_in_dim(values, shape, [0])
