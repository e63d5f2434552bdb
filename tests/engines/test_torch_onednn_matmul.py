"""Keras's matrix products on PyTorch by oneDNN: the same numbers and gradients, and only where they are meant."""

from __future__ import annotations

import pytest

from tests.support.backends import BACKENDS
from tests.support.programs import check_python

PROGRAM = """
import itertools
import keras
import torch
from phalanx.engines.accelerations import torch_onednn_matmul as torch_products
from phalanx.engines.accelerations.torch_onednn_matmul import OneDNNMatmul, product

torch.manual_seed(0)
torch_products.has_faster_products = lambda: True  # the same on any processor, if not faster
made = []
multiplied = torch_products._multiply


def noted(left, right):
    made.append((left.shape, right.shape))
    return multiplied(left, right)


torch_products._multiply = noted


def close(one, other):
    torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5 * float(other.abs().max()))


def laid(rows, columns):
    yield torch.rand(rows, columns)
    yield torch.rand(columns, rows).t()
    yield torch.rand(2 * rows, 2 * columns)[::2, ::2]
    yield torch.rand(rows, columns + 1)[:, 1:]
    yield torch.rand(rows, 1).expand(rows, columns)
    yield torch.rand(columns).expand(rows, columns)


for left, right in itertools.product(laid(70, 300), laid(300, 200)):
    close(product(left, right), left @ right)
assert len(made) == 36

a, b = (torch.rand(*shape, requires_grad=True) for shape in ((70, 300), (300, 200)))


def gradients(multiply):
    (first,) = torch.autograd.grad((multiply(a, b) ** 2).sum(), a, create_graph=True)
    return first, *torch.autograd.grad((first**2).sum(), (a, b))


for one, other in zip(gradients(product), gradients(torch.matmul), strict=True):
    close(one, other)
(of_sum,) = torch.autograd.grad(product(a, b).sum(), b)  # a gradient whose numbers are one and the same
close(of_sum, torch.autograd.grad((a @ b).sum(), b)[0])

del made[:]
v = torch.rand(70, 300)
close(torch.func.jvp(lambda x: product(x, b), (a,), (v,))[1], v @ b)
close(torch.func.vmap(lambda x: product(x, b))(a[None]), (a @ b)[None])
product(a[:2], b)  # too small
try:
    product(a, b.t())
except RuntimeError as error:
    assert "shapes cannot be multiplied" in str(error), error
else:
    raise AssertionError("of matrices that do not fit")
assert not made, made

products = OneDNNMatmul()
cases = [  # arguments of keras.ops.matmul, and whether oneDNN makes it
    (a, b, True),
    (torch.rand(7, 10, 300), keras.Variable(b.detach()), True),
    (torch.rand(2, 70, 300), torch.rand(2, 300, 200), False),
    (a.double(), b.double(), False),
    (a.bfloat16(), b.bfloat16(), False),
    (a.detach().numpy(), b, False),
    (torch.rand(300), b, False),
    (torch.rand(2, 3, 0), torch.rand(0, 5), False),
]
for left, right, meant in cases:
    expected = keras.ops.matmul(left, right)
    del made[:]
    with products:
        result = keras.ops.matmul(left, right)
    assert bool(made) == meant, (left.shape, right.shape)
    assert result.dtype is expected.dtype
    torch.testing.assert_close(result.detach().float(), expected.detach().float(), rtol=2e-5, atol=2e-3)
    del made[:]
    keras.ops.matmul(left, right)
    assert not made, "after the context"

with products, OneDNNMatmul(), products:  # a step that predicts
    keras.ops.matmul(a.double(), b.double())
    assert not made
    keras.ops.matmul(a, b)
    assert made.pop()
keras.ops.matmul(a, b)
assert not made

with products, torch.autocast("cpu", torch.bfloat16):
    assert keras.ops.matmul(a, b).dtype is torch.bfloat16
assert not made, "autocast multiplies in bfloat16"


class Watching(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


with products, Watching():
    keras.ops.matmul(a, b)
assert not made, "something watches the operations"

torch.backends.mkldnn.enabled = False
with products:
    keras.ops.matmul(a, b)
assert not made, "disabled by the user"
torch.backends.mkldnn.enabled = True
with products:
    keras.ops.matmul(a, b)
assert made.pop()
torch.set_float32_matmul_precision("medium")
with products:
    keras.ops.matmul(a, b)
assert not made, "the user allows bfloat16"
"""


@pytest.mark.skipif("torch" not in BACKENDS, reason="of PyTorch")
def test_products_are_the_same_by_either_library() -> None:
    check_python("-c", PROGRAM, backend="torch", bound_s=300)
