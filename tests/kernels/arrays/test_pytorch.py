"""PyTorch's tensors: products, gradients, ``torch.compile`` and the examples, on the CPU. Needs PyTorch."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from distmm_kernels import gram, matmul, verify

torch = pytest.importorskip("torch")
EXAMPLES = Path(__file__).parents[3] / "kernels/examples"

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch")


def test_tensors_come_back_as_tensors_of_the_type_that_pytorch_gives():
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
        a, b = torch.randn(2, 5, 7).to(dtype), torch.randn(7, 4).to(dtype)
        for x, y in ((a, b), (a[0].mT, a[0]), (a, b[:, 0]), (a[0, 0], b), (a[0].mH, a[0])):
            made, expected = matmul(x, y), x @ y
            assert (made.shape, made.dtype, made.device) == (expected.shape, expected.dtype, expected.device)
            torch.testing.assert_close(made, expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-2)
        assert verify(a, b, matmul(a, b))


def test_gradients_are_those_of_finite_differences():
    a, b, c = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 4, 5), (5, 2), (2,)))
    assert torch.autograd.gradcheck(lambda a, b, c: matmul(a, b, c=c, alpha=2, beta=3), (a, b, c))
    assert torch.autograd.gradgradcheck(lambda a, b: matmul(a, b), (a, b))
    z = torch.randn(4, 3, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(gram, (z,))
    v = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v, b: matmul(v, b), (v, b))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_gram_with_gradients_is_the_one_without(dtype):
    """It is Hermitian bit by bit, and reads no element of C above the diagonal."""
    a = torch.randn(2, 40, 30, dtype=dtype, requires_grad=True)
    c = torch.randn(40, 40, dtype=dtype, requires_grad=True)
    made = gram(a, c=c, beta=3)
    assert torch.equal(made, made.mH.resolve_conj())
    assert torch.equal(made, gram(a.detach(), c=c.detach(), beta=3))
    small = a[:, :4, :3].detach().requires_grad_(), c[:4, :4].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, c: gram(a, c=c, alpha=2, beta=3), small)
    compiled = torch.compile(lambda x: gram(x) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(a), 2 * gram(a.detach()))


def test_no_gradient_is_lost_silently():
    a = torch.randn(3, 3, requires_grad=True)
    with pytest.raises(ValueError, match="out= has no gradient"):
        matmul(a, a, torch.empty(3, 3))
    with torch.no_grad():
        torch.testing.assert_close(matmul(a, a, torch.empty(3, 3)), a @ a)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: matmul(x, x).sum())(a.detach())


def test_the_operator_is_registered_as_pytorch_demands():
    a, b = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    matmul(a, b)
    how = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.distmm.matmul, (a, b, None, 2, 0, "highest", False), test_utils=how)


def test_compiled_functions_trace_it_as_one_graph():
    a, b = torch.randn(3, 5, 7, requires_grad=True), torch.randn(7, 4)
    compiled = torch.compile(lambda x, y: matmul(x, y).relu() * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), (a @ b).relu() * 2)
    compiled(a, b).sum().backward()
    (expected,) = torch.autograd.grad(((a @ b).relu() * 2).sum(), a)
    torch.testing.assert_close(a.grad, expected)


@pytest.mark.parametrize(
    ("name", "last"),
    [("muon_step", "singular values"), ("gptq_hessian", "rows 512 right"), ("float32_layers", "after 20 steps")],
)
def test_the_examples_run(name, last, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)
