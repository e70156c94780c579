"""Which parameters share a block: a matrix, and the vector that is added to what it makes of its inputs.

To the layer x W + b the bias b is one more row of W, by which an input that is always 1 is multiplied. Its derivatives
go with those by the mean of the inputs: two blocks, one each, leave every output of every layer a direction in which W
and b undo each other, and which is so much flatter than the rest.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_IN_A_BOX = (jax.tree_util.GetAttrKey("value"),)
"""Where flax has the array of a box, which a variable is, or an array with the names of its axes."""
_ROW, _COLUMN = 0, 1


class Block(NamedTuple):
    """Where the parameters of one block are.

    Attributes:
      leaf: the place of the matrix among the leaves, or of what has a block to itself.
      bias: the place of the vector that is added to what the matrix makes; None where there is none.
      axis: of the matrix, along which the vector is one more.
    """

    leaf: int
    bias: int | None = None
    axis: int = _ROW


def blocks_of(tree: Any) -> tuple[Block, ...]:
    """The blocks, in the order of the leaves.

    A vector goes with a matrix of the same node of the tree if its length is that of the matrix's last axis, as in
    x W + b, or, in a tree that has them as in W x + b, of the first of two. Which of the two a tree has is said by most
    of the vectors that fit one matrix in one way alone; where none says, as where all are square, it is x W + b.
    Where several matrices would do, or several vectors, none is taken for a bias. One of two axes is none either.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    below = collections.Counter(path[:-1] for path, _ in leaves)
    nodes: dict[Any, list[int]] = {}
    for place, (path, _) in enumerate(leaves):
        boxed = path[-1:] == _IN_A_BOX and below[path[:-1]] == 1
        nodes.setdefault(path[: -2 if boxed else -1], []).append(place)
    shapes = [tuple(leaf.shape) for _, leaf in leaves]
    vectors = [(i, places) for places in nodes.values() for i in places if len(shapes[i]) == 1]
    ways = [found for i, places in vectors if (found := _ways(i, places, shapes))]
    said = collections.Counter(found[0].axis for found in ways if len(found) == 1)
    axis = _COLUMN if said[_COLUMN] > said[_ROW] else _ROW
    of_matrix: dict[int, list[Block]] = {}
    for found in ways:
        fitting = [block for block in found if block.axis == axis]
        if len(fitting) == 1:
            of_matrix.setdefault(fitting[0].leaf, []).append(fitting[0])
    with_bias = {leaf: found[0] for leaf, found in of_matrix.items() if len(found) == 1}
    taken = {block.bias for block in with_bias.values()}
    return tuple(with_bias.get(place, Block(place)) for place in range(len(shapes)) if place not in taken)


def _ways(place: int, siblings: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> list[Block]:
    """How a vector may be a bias of what stands beside it."""
    length, matrices = shapes[place][0], [i for i in siblings if len(shapes[i]) > 1]
    rows = [Block(i, place, _ROW) for i in matrices if shapes[i][-1] == length]
    return rows + [Block(i, place, _COLUMN) for i in matrices if len(shapes[i]) == 2 and shapes[i][0] == length]


def joined(tree: Any) -> list[jax.Array]:
    """An array for each block: a matrix with its last axis for columns and its bias in it, or a leaf that is none."""
    leaves = jax.tree.leaves(tree)

    def one(block: Block) -> jax.Array:
        leaf = leaves[block.leaf]
        if leaf.ndim < 2:
            return leaf
        matrix = leaf.reshape(math.prod(leaf.shape[:-1]), leaf.shape[-1])
        if block.bias is None:
            return matrix
        return jnp.concatenate([matrix, jnp.expand_dims(leaves[block.bias], block.axis)], block.axis)

    return [one(block) for block in blocks_of(tree)]


def parted(arrays: Sequence[jax.Array], like: Any) -> Any:
    """The tree of which ``joined`` makes these arrays, in shapes of another, and no coarser than float32."""
    leaves, structure = jax.tree.flatten(like)
    found: list[Any] = list(leaves)
    for block, array in zip(blocks_of(like), arrays, strict=True):
        if block.bias is None:
            pieces = [(block.leaf, array)]
        else:
            matrix, bias = jnp.split(array, [array.shape[block.axis] - 1], block.axis)
            pieces = [(block.leaf, matrix), (block.bias, bias)]
        for place, piece in pieces:
            leaf = leaves[place]
            found[place] = piece.reshape(leaf.shape).astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return jax.tree.unflatten(structure, found)
