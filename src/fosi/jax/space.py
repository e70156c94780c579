"""The vector space of the parameters: the only file that knows how a vector is laid out.

A vector is one flat array, or, where the parameters are sharded, a tuple with one array a leaf in the leaf's
own shape. Flat is what a single device wants (one kernel for a product with the basis instead of one a leaf);
shapes are what a mesh wants (flattening a sharded leaf gathers it). A basis is a vector with a leading axis.
Everything else in the package works on either through the functions below.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

Tree = Any
Vector = jax.Array | tuple[jax.Array, ...]
Basis = jax.Array | tuple[jax.Array, ...]
Layout = Literal["auto", "flat", "leaves"]
Mask = Tree | Callable[[Tree], Tree]

# TF32 or bf16 passes in these products cost the basis its orthogonality (4e-4 against 2e-6 measured).
_FULL = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Space:
    """Which leaves of a parameter tree span the space, and how their vectors are laid out."""

    treedef: Any
    selected: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    shardings: tuple[Any, ...]
    flat: bool

    @property
    def size(self) -> int:
        """The dimension n."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def dtype(self) -> Any:
        """What vectors are kept in: the widest of the leaves, and float32 at least."""
        return jnp.result_type(jnp.float32, *self.dtypes)

    @property
    def product_eps(self) -> float:
        """Relative precision of a Hessian–vector product, which runs in the leaves' own dtypes."""
        return max(float(jnp.finfo(dtype).eps) for dtype in self.dtypes)

    def leaves(self, tree: Tree) -> list[jax.Array]:
        """The leaves of ``tree`` that span the space."""
        leaves = self.treedef.flatten_up_to(tree)
        return [leaves[i] for i in self.selected]

    def merge(self, leaves: Sequence[jax.Array], tree: Tree) -> Tree:
        """``tree`` with the leaves that span the space replaced."""
        merged = self.treedef.flatten_up_to(tree)
        for i, leaf in zip(self.selected, leaves, strict=True):
            merged[i] = leaf
        return self.treedef.unflatten(merged)

    def pack(self, leaves: Sequence[jax.Array], dtype: Any) -> Vector:
        """Leaves as a vector."""
        if self.flat:
            pieces = [jnp.ravel(leaf).astype(dtype) for leaf in leaves]
            return jax.lax.platform_dependent(pieces, cpu=_written, default=_concatenated)
        return tuple(leaf.astype(dtype) for leaf in leaves)

    def unpack(self, vector: Vector, dtypes: Sequence[Any] | None = None) -> list[jax.Array]:
        """A vector, or a whole basis, as leaves; ``dtypes`` default to the parameters'."""
        dtypes = self.dtypes if dtypes is None else dtypes
        if not isinstance(vector, tuple):
            rows = vector.shape[:-1]
            ends = _ends(self.shapes)
            pieces = [
                jax.lax.slice_in_dim(vector, end - math.prod(shape), end, axis=-1).reshape(rows + shape)
                for end, shape in zip(ends, self.shapes, strict=True)
            ]
        else:
            pieces = list(vector)
        return [piece.astype(dtype) for piece, dtype in zip(pieces, dtypes, strict=True)]

    def zeros(self, dtype: Any, *rows: int) -> Basis:
        """A zero vector, or a basis of ``rows`` of them, laid out over devices as the parameters are."""
        if self.flat:
            return jnp.zeros((*rows, self.size), dtype)
        return tuple(
            _zeros((*rows, *shape), dtype, _with_axes(sharding, len(rows)))
            for shape, sharding in zip(self.shapes, self.shardings, strict=True)
        )

    def random(self, key: jax.Array) -> Vector:
        """A vector of independent N(0, 1) numbers, float32."""
        if self.flat:
            return jax.random.normal(key, (self.size,), jnp.float32)
        return tuple(
            jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32, out_sharding=_explicit(sharding))
            for i, (shape, sharding) in enumerate(zip(self.shapes, self.shardings, strict=True))
        )


def check_layout(layout: Any) -> None:
    """Raises a ValueError where ``layout`` is none of the known ones."""
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(map(repr, get_args(Layout)))}, got {layout!r}")


def span(
    params: Tree,
    mask: Mask | None = None,
    layout: Layout = "auto",
    basis: Basis | None = None,
    *,
    empty: bool = False,
) -> Space:
    """The space spanned by the float leaves of ``params`` that ``mask`` lets in.

    Args:
      params: the parameters (arrays, tracers or shapes).
      mask: True for the leaves that take part; a tree of bools (or a prefix of one) or a function of params.
      layout: ``"auto"`` is flat unless a leaf is seen to be sharded.
      basis: a basis made earlier, whose layout is then taken over.
      empty: whether a tree without any leaf will do.

    Raises:
      ValueError: no leaf takes part, one is complex, or they are not those ``basis`` was made for.
    """
    check_layout(layout)
    leaves, treedef = jax.tree.flatten(params)
    inside = _mask_leaves(mask, params, treedef)
    dtypes = [_dtype(leaf) for leaf in leaves]
    selected = [i for i, dtype in enumerate(dtypes) if inside[i] and jnp.issubdtype(dtype, jnp.inexact)]
    for i in selected:
        if jnp.issubdtype(dtypes[i], jnp.complexfloating):
            raise ValueError(
                f"params has a leaf of dtype {dtypes[i]}: complex parameters are not supported; "
                "hold the real and imaginary parts as two real leaves, or keep the leaf out with mask="
            )
    if not leaves and not empty:
        raise ValueError(f"params has no leaves; FOSI needs at least one float array, got {params!r}")
    if leaves and not selected:
        raise ValueError(
            f"params has no float leaf for the subspace among dtypes {sorted({str(d) for d in dtypes})}"
            + (" that mask lets in" if mask is not None else "")
            + "; FOSI needs at least one"
        )
    shardings = tuple(_sharding(leaves[i]) for i in selected)
    shapes = tuple(tuple(getattr(leaves[i], "shape", ())) for i in selected)  # a leaf may be a Python number
    if basis is not None:
        flat = not isinstance(basis, tuple)
    else:
        # Without leaves (optax.tree.map_params asks for such a state) one array stands for the whole tuple.
        flat = layout == "flat" or not selected or (layout == "auto" and all(s is None for s in shardings))
    space = Space(treedef, tuple(selected), shapes, tuple(dtypes[i] for i in selected), shardings, flat)
    if basis is not None:
        _check_fit(space, basis)
    return space


def products(basis: Basis, vector: Vector) -> jax.Array:
    """The inner products of every row with ``vector``."""

    def one(rows: jax.Array, x: jax.Array) -> jax.Array:
        if _sharding(rows) is None:
            return jnp.tensordot(rows, x, axes=x.ndim, precision=_FULL)
        # A contraction over a sharded axis is ambiguous on an explicit mesh; a sum is not.
        return jnp.sum(rows * x[None], axis=tuple(range(1, rows.ndim)))

    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(one, basis, vector)))


def combine(basis: Basis, coefficients: jax.Array) -> Vector:
    """The linear combination of the rows; a matrix of coefficients (rows, r) gives a basis of r rows."""

    def one(rows: jax.Array) -> jax.Array:
        return jnp.tensordot(coefficients.astype(rows.dtype).T, rows, axes=1, precision=_FULL)

    return jax.tree.map(one, basis)


def norm(vector: Vector) -> jax.Array:
    """The Euclidean norm."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(vector)))


def put(basis: Basis, index: Any, vector: Vector) -> Basis:
    """The basis with one row replaced."""
    return jax.tree.map(
        lambda rows, x: jax.lax.dynamic_update_index_in_dim(rows, x.astype(rows.dtype), index, 0), basis, vector
    )


def rows_where(keep: jax.Array, basis: Basis, other: Basis | None = None) -> Basis:
    """Rows of ``basis`` where ``keep`` (one bool, or one a row), of ``other`` or zeros elsewhere."""

    def one(rows: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.where(keep.reshape(keep.shape + (1,) * (rows.ndim - keep.ndim)), rows, others)

    other = jax.tree.map(jnp.zeros_like, basis) if other is None else other
    return jax.tree.map(one, basis, other)


def _written(pieces: list[jax.Array]) -> jax.Array:
    """Pieces written one after the other: on a CPU a memory copy, where a concatenation is a slow loop (4×)."""
    out, end = jnp.zeros(sum(piece.size for piece in pieces), pieces[0].dtype), 0
    for piece in pieces:
        out = jax.lax.dynamic_update_slice(out, piece, (end,))
        end += piece.size
    return out


def _concatenated(pieces: list[jax.Array]) -> jax.Array:
    # Fused into the product that follows, a concatenation of many leaves makes that product six times slower. And what
    # is fused into it is computed as its entries are, one by one: the sum of a batch's gradients of a bias took a step
    # of softmax regression from 0.06 ms to 0.44.
    pieces = jax.lax.optimization_barrier(pieces)
    return jax.lax.optimization_barrier(jnp.concatenate(pieces))


def _check_fit(space: Space, basis: Basis) -> None:
    if isinstance(basis, tuple):
        shapes = tuple(rows.shape[1:] for rows in basis)
        if space.shapes != shapes:
            raise ValueError(f"params has leaves of shapes {space.shapes}, but the state was made for {shapes}")
    elif space.size != basis.shape[-1]:
        raise ValueError(f"params has {space.size} numbers, but the state was made for {basis.shape[-1]}")


def _ends(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    ends, total = [], 0
    for shape in shapes:
        total += math.prod(shape)
        ends.append(total)
    return ends


def _mask_leaves(mask: Mask | None, params: Tree, treedef: Any) -> list[bool]:
    if mask is None:
        return [True] * treedef.num_leaves
    tree = mask(params) if callable(mask) else mask
    try:
        full = jax.tree.map(lambda m, part: jax.tree.map(lambda _: bool(m), part), tree, params)
    except ValueError as error:
        raise ValueError(f"mask must be a tree of bools shaped like params, or a prefix of it: {error}") from error
    return treedef.flatten_up_to(full)


def _dtype(leaf: Any) -> Any:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    # A NumPy float64 leaf is float32 to JAX while x64 is off.
    return jax.dtypes.canonicalize_dtype(dtype) if jnp.issubdtype(dtype, jnp.number) else dtype


def _sharding(leaf: Any) -> Any:
    """The leaf's sharding where it is split over devices and that can be seen, else None."""
    if not isinstance(leaf, jax.core.Tracer) and getattr(leaf, "sharding", None) is not None:
        sharding = leaf.sharding
    else:
        # Inside jit only an explicit mesh tells, in the type.
        sharding = getattr(jax.typeof(leaf), "sharding", None) if isinstance(leaf, jax.Array) else None
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.is_fully_replicated:
        return None
    return sharding


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    zeros = jnp.zeros(shape, dtype, device=sharding)
    if sharding is None or not isinstance(zeros, jax.core.Tracer):
        return zeros
    # While tracing, jnp.zeros overlooks a sharding over actual devices.
    place: Any = jax.sharding.reshard if _explicit(sharding) else jax.lax.with_sharding_constraint
    placed: jax.Array = place(zeros, sharding)
    return placed


def _with_axes(sharding: Any, leading: int) -> Any:
    if sharding is None:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.P(*[None] * leading, *sharding.spec))


def _explicit(sharding: Any) -> Any:
    """``sharding`` where the mesh is explicit: only there may (and must) an operation be given one."""
    if sharding is None or any(t != jax.sharding.AxisType.Explicit for t in sharding.mesh.axis_types):
        return None
    return sharding
