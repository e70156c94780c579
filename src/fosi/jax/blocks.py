"""Which parameters share a block: a matrix, and the vector that is added to what it makes of its inputs.

To the layer W x + b the bias b is one more column of W, by which an input that is always 1 is multiplied. Its
derivatives go with those by the mean of the inputs: two blocks, one each, leave every output of every layer a direction
in which W and b undo each other, and which is so much flatter than the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_IN_A_BOX = (jax.tree_util.GetAttrKey("value"),)
"""Where flax has an array, of a box that has nothing else: a variable, or an array with the names of its axes."""


class Block(NamedTuple):
    """Where the parameters of one block are.

    Attributes:
      leaf: the place of the matrix among the leaves, or of what has a block to itself.
      bias: the place of the vector that is added to what the matrix makes; None where there is none.
      axis: of the matrix, along which the vector is one more.
    """

    leaf: int
    bias: int | None = None
    axis: int = 0


def blocks_of(tree: Any) -> tuple[Block, ...]:
    """The blocks, in the order of the leaves.

    A vector goes with a matrix of the same node of the tree if its length is that of the matrix's last axis, as in x W
    + b, or, where no matrix's is, of the first of two, as in W x + b. Where several matrices would do, or several
    vectors, none is taken for a bias.
    """
    with_paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    nodes: dict[Any, list[int]] = {}
    for place, (path, _) in enumerate(with_paths):
        boxed = path[-1:] == _IN_A_BOX
        nodes.setdefault(path[: -2 if boxed else -1], []).append(place)
    shapes = [tuple(leaf.shape) for _, leaf in with_paths]
    biases: dict[int, list[Block]] = {}
    for places in nodes.values():
        for place in places:
            if len(shapes[place]) == 1 and (found := _with_bias(place, places, shapes)) is not None:
                biases.setdefault(found.leaf, []).append(found)
    joined = {leaf: found[0] for leaf, found in biases.items() if len(found) == 1}
    taken = {block.bias for block in joined.values()}
    return tuple(joined.get(place, Block(place)) for place in range(len(shapes)) if place not in taken)


def _with_bias(place: int, siblings: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> Block | None:
    length, matrices = shapes[place][0], [i for i in siblings if len(shapes[i]) > 1]
    last = [Block(i, place, 0) for i in matrices if shapes[i][-1] == length]
    first = [Block(i, place, 1) for i in matrices if len(shapes[i]) == 2 and shapes[i][0] == length]
    found = last or first
    return found[0] if len(found) == 1 else None


def joined(tree: Any) -> list[jax.Array]:
    """An array for each block: a matrix with its last axis for columns and its bias in it, or a leaf that is none."""
    leaves = jax.tree.leaves(tree)

    def one(block: Block) -> jax.Array:
        leaf = leaves[block.leaf]
        if leaf.ndim < 2:
            return leaf
        matrix = leaf.reshape(-1, leaf.shape[-1])
        if block.bias is None:
            return matrix
        return jnp.concatenate([matrix, jnp.expand_dims(leaves[block.bias], block.axis)], block.axis)

    return [one(block) for block in blocks_of(tree)]


def parted(arrays: Sequence[jax.Array], like: Any) -> Any:
    """The tree of which ``joined`` makes these arrays, in shapes of another."""
    leaves, structure = jax.tree.flatten(like)
    found: list[Any] = list(leaves)
    for block, array in zip(blocks_of(like), arrays, strict=True):
        shape = leaves[block.leaf].shape
        if block.bias is not None:
            size = array.shape[block.axis] - 1
            array, bias = jnp.split(array, [size], block.axis)
            found[block.bias] = bias.reshape(-1)
        found[block.leaf] = array.reshape(shape)
    return jax.tree.unflatten(structure, found)
