"""Which vector is taken for the bias of which matrix, and that nothing is lost on the way there and back."""

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from fosi.jax.blocks import Block, blocks_of, joined, parted
from tests.jax.running import x64


def of_shapes(tree):
    """The same tree with arrays for tuples, whose numbers are all different."""
    count = itertools.count()
    shapes = lambda x: type(x) is tuple and all(isinstance(i, int) for i in x)  # noqa: E731
    made = lambda s: jnp.asarray([float(next(count)) for _ in range(int(np.prod(s)))]).reshape(s)  # noqa: E731
    return jax.tree.map(made, tree, is_leaf=shapes)


class Heads(NamedTuple):
    """Has an array by the name that flax has in its boxes."""

    query: Any
    value: Any


CASES = {
    "x W + b": ({"b": (3,), "w": (2, 3)}, (Block(1, 0, 0),)),
    "W x + b": ({"bias": (3,), "weight": (3, 2)}, (Block(1, 0, 1),)),
    "W x + b, twice as wide as long": (
        {"b1": (4,), "b2": (2,), "w1": (4, 8), "w2": (2, 4)},
        (Block(2, 0, 1), Block(3, 1, 1)),
    ),
    "W x + b, one of them square": ([[(3, 2), (3,)], [(3, 3), (3,)]], (Block(0, 1, 1), Block(2, 3, 1))),
    "x W + b, one of them square": ([[(2, 3), (3,)], [(3, 3), (3,)]], (Block(0, 1, 0), Block(2, 3, 0))),
    "no box": ({"heads": Heads((2, 2), (2, 3)), "scale": (3,)}, (Block(0), Block(1), Block(2))),
    "square": ({"b": (3,), "w": (3, 3)}, (Block(1, 0, 0),)),
    "a convolution": ({"bias": (5,), "kernel": (2, 2, 3, 5)}, (Block(1, 0, 0),)),
    "pairs in a list": ([[(2, 3), (3,)], [(3, 4), (4,)]], (Block(0, 1, 0), Block(2, 3, 0))),
    "all in one node": ({"b1": (3,), "b2": (4,), "w1": (2, 3), "w2": (3, 4)}, (Block(2, 0, 0), Block(3, 1, 0))),
    "two matrices that fit": ({"b": (3,), "v": (4, 3), "w": (2, 3)}, (Block(0), Block(1), Block(2))),
    "two vectors that fit": ({"b": (3,), "scale": (3,), "w": (2, 3)}, (Block(0), Block(1), Block(2))),
    "none that fits": ({"b": (5,), "w": (2, 3)}, (Block(0), Block(1))),
    "the first axis of many": ({"b": (2,), "w": (2, 4, 3)}, (Block(0), Block(1))),
    "of another node": ({"norm": {"b": (3,)}, "w": (2, 3)}, (Block(0), Block(1))),
    "a number and a vector": ({"a": (), "b": (3,)}, (Block(0), Block(1))),
    "a matrix alone": ((2, 3), (Block(0),)),
}


@pytest.mark.parametrize("case", CASES)
def test_which_go_together(case):
    shapes, wanted = CASES[case]
    tree = of_shapes(shapes)
    assert blocks_of(tree) == wanted
    arrays, leaves = joined(tree), jax.tree.leaves(tree)
    for array, block in zip(arrays, wanted, strict=True):
        leaf = leaves[block.leaf]
        matrix = leaf.reshape(-1, leaf.shape[-1]) if leaf.ndim > 1 else leaf
        kept = matrix if block.bias is None else np.delete(array, -1, axis=block.axis)
        np.testing.assert_array_equal(kept, matrix)
        if block.bias is None:
            assert array.size == leaf.size
        else:
            np.testing.assert_array_equal(np.take(np.asarray(array), -1, axis=block.axis), leaves[block.bias])
    again = parted(arrays, tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, again, tree)


def test_boxes_of_flax_are_no_nodes():
    """Each has one array: the layer around two of them is the node."""
    tree = nnx.state(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 3, rngs=nnx.Rngs(0))), nnx.Param)
    assert [(block.bias is not None, block.axis) for block in blocks_of(tree)] == [(True, 0)] * 2
    assert [array.shape for array in joined(tree)] == [(3, 3), (4, 3)]
    jax.tree.map(np.testing.assert_array_equal, parted(joined(tree), tree), tree)
    kernel = nn.with_partitioning(nn.initializers.ones_init(), (None, "model"))
    mixed = nn.Dense(3, kernel_init=kernel).init(jax.random.key(0), jnp.ones((1, 2)))
    assert blocks_of(mixed) == (Block(1, 0, 0),)


def test_layers_of_equinox():
    """W x + b, of which the hidden ones are square."""
    tree = eqx.filter(eqx.nn.MLP(3, 2, 4, 3, key=jax.random.key(0)), eqx.is_array)
    assert [(block.bias is not None, block.axis) for block in blocks_of(tree)] == [(True, 1)] * 4
    assert [array.shape for array in joined(tree)] == [(4, 4), (4, 5), (4, 5), (2, 5)]


def test_dtypes_of_what_was_joined():
    """Each leaf's own, and no coarser than float32."""
    tree = {"bias": jnp.ones(3, jnp.float16), "kernel": jnp.ones((2, 3), jnp.float32)}
    with x64(np.float64):
        wide = {"bias": jnp.ones(3, jnp.float32), "kernel": jnp.ones((2, 3), jnp.float64)}
        assert jax.tree.map(jnp.result_type, parted(joined(wide), wide)) == jax.tree.map(jnp.result_type, wide)
    assert {x.dtype for x in jax.tree.leaves(parted(joined(tree), tree))} == {jnp.dtype(jnp.float32)}
