"""Device half: how one epilogue subtile runs the traced function.

quack's visitor (``quack.epilogue.visit``) already runs single values and packed
16-bit pairs. Added here: stores of full width beside half-width ones when accumulator
columns are paired, and reductions that are exact on ragged tiles.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, const_expr
from quack.epilogue import ops as quack_ops
from quack.epilogue.ops import ColVecLoad, ColVecReduce, RowVecLoad, RowVecReduce
from quack.epilogue.visit import _EpiModMixinBase

from ..pairs import Pair


@cute.jit
def _combine(a, b, combine):
    if const_expr(combine == "add"):
        return a + b
    return cute.arch.fmax(a, b, abs=combine == "max_abs", nan=True)


# quack folds maxima with the quiet fmax: one NaN in a row would be gone from the row's maximum,
# while PyTorch's amax and our interpreter keep it. All its reductions call this one function.
quack_ops._vec_reduce_combine = _combine


class _BoundedReduce:
    """Reduction over the elements inside the matrix only, at the price of a select per element.

    For programs whose value outside the matrix is not the fold's identity (a sum of
    ``exp(acc)``, say). quack masks ``max`` only.
    """

    def _mask_oob_active(self):
        return True

    @cute.jit
    def _mask_oob(self, frag, coords, limit, tile_shape_mn):
        dim = const_expr(self._reduce_dim())
        fill = const_expr(-math.inf if self.combine == "max" else 0.0)
        if Boolean(limit < tile_shape_mn[dim]):
            stride = const_expr((1, 0) if dim == 0 else (0, 1))
            offsets = cute.composition(cute.make_layout(tile_shape_mn, stride=stride), coords.layout)
            inside = limit - coords[0][dim]
            for i in cutlass.range(cute.size(frag), unroll_full=True):
                frag[i] = frag[i] if cute.crd2idx(i, offsets) < inside else fill

    # Not @cute.jit: the DSL's rewriting loses the class cell that super() needs.
    def fn_sink_flush(self, gemm, state, frag, scale=None):
        if scale is not None:
            _, coords, limit = state
            self._mask_oob(scale, coords, limit, gemm.cta_tile_shape_mnk[:2])
        super().fn_sink_flush(gemm, state, frag, scale)


class BoundedColVecReduce(_BoundedReduce, ColVecReduce):
    """Per-row reduction (along N) bounded by N."""


class BoundedRowVecReduce(_BoundedReduce, RowVecReduce):
    """Per-column reduction (along M) bounded by M."""


class _ZeroTail:
    """Vector load whose tile is zero beyond the vector's end.

    quack leaves stale shared memory there, which a reduction over a ragged tile
    could pick up as NaN. One short loop in the last tile only.
    """

    @cute.jit
    def _zero_tail(self, param, smem_tensor, ctx, barrier):
        tile_dim = const_expr(self._tile_dim(ctx))
        start = ctx.tile_coord_mnkl[self._coord_idx()] * tile_dim
        limit = cute.size(self._get_gmem_vec(param, ctx), mode=[0]) - start
        if Boolean(limit < tile_dim):
            for i in cutlass.range(ctx.tidx, tile_dim, ctx.num_epi_threads):
                if Boolean(i >= limit):
                    smem_tensor[i] = param.element_type(0.0)
            # the asynchronous copy that follows may write these elements, too
            barrier.arrive_and_wait()

    def begin(self, gemm, param, smem_tensor, ctx):
        self._zero_tail(param, smem_tensor, ctx, ctx.epilogue_barrier)
        return super().begin(gemm, param, smem_tensor, ctx)


class ZeroTailRowVecLoad(_ZeroTail, RowVecLoad):
    """Row vector, zero beyond N."""


class ZeroTailColVecLoad(_ZeroTail, ColVecLoad):
    """Column vector, zero beyond M."""


class ProgramVisitor(_EpiModMixinBase):
    """Runs a lowered program over one epilogue subtile."""

    _index_operands = ()  # names of the loads that hold column indices for ColVecSelect

    _full_width_outputs = ()  # auxiliary stores of full width while columns are paired
    traced = None  # the GEMM object of the last trace, asked for its shared-memory size

    def epi_to_underlying_arguments(self, args, *, loc=None, ip=None):
        type(self).traced = self
        return super().epi_to_underlying_arguments(args, loc=loc, ip=ip)

    def epi_begin(self, params, epi_smem_tensors, epi_tile, tiled_copy_t2r, tiled_copy_r2s, tile_coord_mnkl,
                  varlen_manager, epilogue_barrier, tidx, tRS_rD_layout=None):  # fmt: skip
        results = super().epi_begin(
            params, epi_smem_tensors, epi_tile, tiled_copy_t2r, tiled_copy_r2s, tile_coord_mnkl,
            varlen_manager, epilogue_barrier, tidx, tRS_rD_layout,
        )  # fmt: skip
        for name in self._index_operands:
            self._drop_outside(epi_smem_tensors[name], tile_coord_mnkl[1], varlen_manager.len_n(), epilogue_barrier, tidx)
        return results

    @cute.jit
    def _drop_outside(self, index, tile_n, columns, barrier, tidx):
        """Turn indices of columns beyond N into -1.

        In the last, ragged tile such an index would select a padded column, which quack's
        ColVecSelect takes for a hit. Every other tile skips this in one uniform branch.
        """
        rows, width = const_expr(self.cta_tile_shape_mnk[0]), const_expr(self.cta_tile_shape_mnk[1])
        if Boolean(columns - tile_n * width < width):
            for i in cutlass.range(tidx, rows, const_expr(self.num_epi_warps * cute.arch.WARP_SIZE)):
                if Boolean(index[i] >= columns):
                    index[i] = index.element_type(-1)
            barrier.arrive_and_wait()

    @cute.jit
    def epi_visit_subtile(self, params, epi_loop_tensors, tRS_rD, tRS_rC=None):
        if const_expr(self._epi_mod_group_n != 2):
            return _EpiModMixinBase.epi_visit_subtile(
                self, params, epi_loop_tensors, tRS_rD, tRS_rC
            )
        ops = {op.name: op for op in self._epi_ops}
        half_shape = cute.recast_layout(2, 1, tRS_rD.layout).shape
        acc = cute.flat_divide(tRS_rD, cute.make_layout(2))
        acc0, acc1 = acc[0, ...], acc[1, ...]

        operands = {}
        for name, kind in self._epi_mod_operands:
            if const_expr(kind == "scalar"):
                operands[name] = epi_loop_tensors[name]
            else:
                frag = epi_loop_tensors[name]
                if const_expr(kind == "tile"):
                    frag = frag.to(self.acc_dtype)
                elif const_expr(kind == "value"):
                    frag = ops[name].fn_prepare(self, frag, True)
                lanes = cute.flat_divide(frag, cute.make_layout(2))
                operands[name] = (lanes[0, ...], lanes[1, ...])

        outs, views = [], {}
        for name in self._epi_mod_outputs:
            if const_expr(name in self._full_width_outputs):
                frag = cute.make_rmem_tensor(tRS_rD.layout.shape, self.acc_dtype)
                lanes = cute.flat_divide(frag, cute.make_layout(2))
                views[name] = (lanes[0, ...], lanes[1, ...])
            else:
                frag = cute.make_rmem_tensor(half_shape, self.acc_dtype)
                views[name] = (frag, None)
            outs.append(frag)
        sinks = {}
        for name in self._epi_mod_sinks:
            frag = cute.make_rmem_tensor(tRS_rD.layout.shape, self.acc_dtype)
            lanes = cute.flat_divide(frag, cute.make_layout(2))
            views[name] = (lanes[0, ...], lanes[1, ...])
            sinks[name] = frag

        fn = self._epi_mod_fn
        for i in cutlass.range(cute.size(acc0), unroll_full=True):
            kw = {
                name: (
                    operands[name]
                    if kind == "scalar"
                    # both lanes of a column vector are the same register
                    else operands[name][0][i]
                    if kind == "col"
                    else Pair(operands[name][0][i], operands[name][1][i])
                )
                for name, kind in self._epi_mod_operands
            }
            res = fn(Pair(acc0[i], acc1[i]), **kw)
            for name, (lane0, lane1) in views.items():
                if const_expr(lane1 is None):
                    lane0[i] = res[name]
                else:
                    lane0[i], lane1[i] = res[name][0], res[name][1]
            if const_expr("D" in res):
                acc0[i], acc1[i] = res["D"][0], res["D"][1]
        for name, frag in sinks.items():
            ops[name].fn_sink_flush(self, epi_loop_tensors[name], frag)
        return tuple(outs)
