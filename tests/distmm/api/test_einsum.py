"""`einsum` and `multi_dot`: NumPy's results for any subscripts, few copies, and refusals before any work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import distmm
from distmm.errors import DoesNotFitError, InputError
from distmm.planning.cluster_spec import ClusterSpec
from distmm.product import contraction
from distmm.product.product import Gemm
from distmm.transfer import has_gaps
from tests.exact_sums import whole_numbers
from tests.tables import number_of

pytestmark = pytest.mark.usefixtures("synchronous")


@st.composite
def contractions(draw: Any) -> tuple[str, list[np.ndarray]]:
    """Subscripts, and arrays of small whole numbers in any order of memory."""
    letters = "abCde"[: draw(st.integers(1, 5))]
    sizes = {letter: draw(st.sampled_from([1, 2, 3, 4, 5, 0])) for letter in letters}
    stack = draw(st.lists(st.integers(1, 3), max_size=2))
    terms, arrays, hidden = [], [], 0
    for number in range(draw(st.integers(1, 4))):
        term = draw(st.lists(st.sampled_from(letters), max_size=4))
        shape = [1 if term.count(x) == 1 and draw(st.integers(0, 9)) == 0 else sizes[x] for x in term]
        if draw(st.booleans()):
            own = [draw(st.sampled_from([1, n])) for n in stack[draw(st.integers(0, len(stack))) :]]
            at, hidden = draw(st.integers(0, len(term))), max(hidden, len(own))
            term, shape = [*term[:at], "...", *term[at:]], [*shape[:at], *own, *shape[at:]]
        order = draw(st.permutations(range(len(shape))))
        made = whole_numbers(tuple(shape[axis] for axis in order), "i8", number)
        terms.append("".join(term))
        arrays.append(made.transpose(np.argsort(order)) if shape else made)
    there = sorted({x for term in terms for x in term.replace("...", "")})
    if draw(st.booleans()) or not there:
        text = ",".join(terms)
    else:
        output = draw(st.lists(st.sampled_from(there), unique=True))
        if hidden or draw(st.booleans()):
            output.insert(draw(st.integers(0, len(output))), "...")
        text = f"{','.join(terms)}->{''.join(output)}"
    return text, arrays


@settings(max_examples=number_of(120))
@given(contractions(), st.data())
def test_it_is_numpys_for_any_subscripts(network: tuple[str, list[np.ndarray]], data: st.DataObject) -> None:
    text, arrays = network
    chunks = data.draw(st.integers(1, 4))
    given = [da.from_array(x, chunks=chunks) if data.draw(st.booleans()) else x for x in arrays]
    expected = np.einsum(text, *arrays)
    # Boxes of few elements, as large arrays have larger ones.
    largest, box = data.draw(st.integers(1, 30)), contraction._box
    with patch.object(contraction, "_box", lambda array, labels, edge: box(array, labels, min(edge, largest))):
        C = distmm.einsum(text, *given)
    assert isinstance(C, da.Array)
    assert (C.shape, C.dtype) == (expected.shape, expected.dtype)
    for computed in (C.compute(), dask.compute(C)[0]):
        assert isinstance(computed, np.ndarray if expected.shape else np.generic)
        np.testing.assert_array_equal(computed, expected)


@pytest.mark.parametrize("text", ["", ","])
@pytest.mark.parametrize("lazy", [False, True])
def test_arrays_without_dimensions_give_scalars(text: str, lazy: bool) -> None:
    x = np.array(6)
    C = distmm.einsum(text, *[da.from_array(x, chunks=1) if lazy else x] * (1 + len(text)))
    for computed in (C.compute(), dask.compute(C)[0]):
        assert isinstance(computed, np.int64)
        assert computed == 6 ** (1 + len(text))


@pytest.mark.parametrize("text", ["ij,jk->ik", "ij,k->k", "ij,ij->i", "i,j->ij", "ij->j"])
@pytest.mark.parametrize("types", [("?", "?"), ("i1", "i1"), ("i1", "i8"), ("?", "f4"), ("f4", "c8"), ("f2", "f2")])
def test_result_types_and_integers_that_wrap_are_numpys(text: str, types: tuple[str, str]) -> None:
    sizes = {"i": 300, "j": 5, "k": 3}
    terms = text.partition("->")[0].split(",")
    arrays = [
        (whole_numbers(tuple(sizes[x] for x in term), "f8", n) / 2).astype(dtype)
        for n, (term, dtype) in enumerate(zip(terms, types, strict=False))
    ]
    expected = np.einsum(text, *arrays)
    result = expected.dtype
    if result == np.float16:  # NumPy rounds to float16 after each addition
        expected = np.einsum(text, *(x.astype("f4") for x in arrays))
    for operands in (arrays, [da.from_array(x, chunks=100) for x in arrays]):
        C = distmm.einsum(text, *operands)
        assert C.dtype == result
        np.testing.assert_allclose(C.compute(), expected, rtol=2e-3 if types[0] == "f2" else 1e-6)


def test_mixed_types_of_many_operands_meet_before_the_first_product() -> None:
    a, b, c = whole_numbers((3, 100), "i1"), whole_numbers((100, 4), "i1", 1), whole_numbers((4, 2), "i8", 2)
    np.testing.assert_array_equal(distmm.einsum("ij,jk,kl", a, b, c).compute(), np.einsum("ij,jk,kl", a, b, c))


def test_the_interleaved_form_is_numpys() -> None:
    a, b = whole_numbers((2, 3, 4), "i4"), whole_numbers((4, 5), "i4", 1)
    for more in ([], [[Ellipsis, 7, 0]]):
        arguments = [a, [..., 0, 30], b, [30, 7], *more]
        np.testing.assert_array_equal(distmm.einsum(*arguments).compute(), np.einsum(*arguments))


def test_many_indices_that_are_numbers_are_in_ascending_order_in_the_output() -> None:
    indices = list(range(27))  # opt_einsum names those from 26 by capitals, which NumPy sorts before other letters
    a, b = np.ones((1,) * 18), np.ones((1,) * 8 + (2,))
    arguments = [a, indices[:18], b, indices[18:]]
    assert distmm.einsum(*arguments).shape == np.einsum(*arguments).shape == (1,) * 26 + (2,)


def test_objects_with_shape_and_type_are_operands(tmp_path: Any, products: list[Gemm]) -> None:
    a, b = whole_numbers((6, 4, 5), "f8"), whole_numbers((6, 3, 5), "f8", 1)
    A, B = (zarr.create_array(tmp_path / name, data=x, chunks=(2, 3, 3)) for name, x in (("a", a), ("b", b)))
    np.testing.assert_array_equal(distmm.einsum("bik,bjk->bij", A, B).compute(), np.einsum("bik,bjk->bij", a, b))
    read = [products[0].a.source.path, products[0].b.source.path]
    assert read == [str(tmp_path / "a"), str(tmp_path / "b")]  # they are read block by block, B transposed
    np.testing.assert_array_equal(distmm.einsum("bik,bjk->ij", A, b).compute(), np.einsum("bik,bjk->ij", a, b))
    np.testing.assert_array_equal(distmm.einsum("bik->kb", A).compute(), np.einsum("bik->kb", a))
    mapped = np.load(save(tmp_path / "a.npy", a), mmap_mode="r")
    np.testing.assert_array_equal(distmm.einsum("bik,bjk->ij", mapped, b).compute(), np.einsum("bik,bjk->ij", a, b))


def save(path: Any, array: np.ndarray) -> Any:
    np.save(path, array)
    return path


# What is multiplied


@pytest.mark.parametrize(
    ("text", "shapes", "batch"),
    [
        ("ij,jk->ik", [(3, 4), (4, 5)], ()),
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)], (2,)),
        ("bij,bkj->bki", [(2, 3, 4), (2, 5, 4)], (2,)),
        ("ibj,kbj->bik", [(3, 2, 4), (5, 2, 4)], (2,)),
        ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)], (2,)),
        ("bsd,de->bse", [(2, 3, 4), (4, 5)], ()),
        ("aijk,al->ijkl", [(4, 2, 3, 2), (4, 5)], ()),
        ("iij,jk->ik", [(3, 3, 4), (4, 5)], ()),
    ],
)
def test_two_arrays_take_one_product_of_views(
    text: str, shapes: list[tuple[int, ...]], batch: tuple[int, ...], products: list[Gemm]
) -> None:
    arrays = [whole_numbers(shape, "i8", seed) for seed, shape in enumerate(shapes)]
    C = distmm.einsum(text, *arrays)
    (gemm,) = products
    assert gemm.problem.batch == batch
    for operand, array in zip((gemm.a, gemm.b), arrays[::-1] if text.endswith("ki") else arrays, strict=True):
        assert np.shares_memory(operand.source, array)
        assert not has_gaps(operand.source)  # those would be copied
    np.testing.assert_array_equal(C.compute(), np.einsum(text, *arrays))


@pytest.mark.parametrize("text", ["ij,jk->ki", "ji,jk->ki", "ij,kj->ki", "bij,bjk->bki"])
def test_a_result_in_the_other_order_is_a_product_and_not_its_transpose(text: str) -> None:
    x = whole_numbers((3, 12, 12) if "b" in text else (12, 12), "i8")
    A = da.from_array(x, chunks=5)
    C = distmm.einsum(text, A, A)
    assert not [name for name in C.dask.layers if "transpose" in name]
    np.testing.assert_array_equal(C.compute(), np.einsum(text, x, x))


def test_matrices_of_a_stack_are_copied_into_a_large_one(products: list[Gemm]) -> None:
    a, b = whole_numbers((3, 4), "i8"), whole_numbers((200, 4, 5), "i8", 1)
    C = distmm.einsum("ij,bjk->bik", a, b)
    assert (products[0].problem.batch, products[0].problem.n) == ((), 1000)
    np.testing.assert_array_equal(C.compute(), np.einsum("ij,bjk->bik", a, b))


def test_indices_of_one_array_alone_are_summed_before(products: list[Gemm]) -> None:
    a, b = whole_numbers((6, 3, 4), "i8"), whole_numbers((4, 5, 2), "i8", 1)
    for A, B in ((a, b), (da.from_array(a, chunks=2), da.from_array(b, chunks=2))):
        C = distmm.einsum("xij,jky->ik", A, B)
        assert products.pop().problem.k == 4
        np.testing.assert_array_equal(C.compute(), np.einsum("xij,jky->ik", a, b))


def test_an_outer_product_has_chunks_that_fit() -> None:
    x = np.ones(100_000)
    for X in (x, da.from_array(x, chunks=10_000)):
        C = distmm.einsum("i,j->ij", X, x)
        assert C.shape == (100_000, 100_000)
        assert 8 * np.prod(C.chunksize) <= 2**27


def test_chains_are_multiplied_in_the_cheapest_order(products: list[Gemm]) -> None:
    sizes = [30, 2, 40, 3, 50]
    matrices = [whole_numbers(shape, "i8", n) for n, shape in enumerate(itertools.pairwise(sizes))]
    expected = np.linalg.multi_dot(matrices)
    for C in (distmm.multi_dot(matrices), distmm.einsum("ij,jk,kl,lm->im", *matrices)):
        # ((0 ((1 2) 3)): 240 + 300 + 3000 multiplications; from left to right 2400 + 3600 + 4500.
        steps = [products.pop(0).problem for _ in range(3)]
        assert sum(step.m * step.k * step.n for step in steps) == 2 * 40 * 3 + 2 * 3 * 50 + 30 * 2 * 50
        np.testing.assert_array_equal(C.compute(), expected)


def test_no_intermediate_result_exceeds_the_memory(monkeypatch: pytest.MonkeyPatch, products: list[Gemm]) -> None:
    from distmm.clusters import cluster

    a, b, c = whole_numbers((50, 3), "i8"), whole_numbers((3, 50), "i8", 1), whole_numbers((50, 50), "i8", 2)
    text, memory = "ia,aj,ij->", 10**9

    def described(*args: Any, **kwargs: Any) -> ClusterSpec:
        return ClusterSpec(workers=2, memory=memory, device="cpu", rate=1e9, link=1e9)

    monkeypatch.setattr(cluster, "describe", described)
    expected = np.einsum(text, a, b, c)
    assert distmm.einsum(text, a, b, c).compute() == expected
    memory = 50 * 10 * 8 // 2  # for 500 elements: aj,ij->ai has 150, the product of a and b 2500
    assert distmm.einsum(text, a, b, c).compute() == expected
    memory = 50
    with pytest.raises(DoesNotFitError, match=r"no order of the 3 arrays was found .* 100 B, the memory of 2 workers"):
        distmm.einsum(text, a, b, c)
    with pytest.raises(DoesNotFitError, match="no order of the 4 arrays was found"):
        distmm.multi_dot([a.T, c, c, a])


@pytest.mark.minutes
def test_a_cluster_multiplies_a_network(client: Client) -> None:
    tensors = [whole_numbers(shape, "f8", n) for n, shape in enumerate([(6, 5, 4), (4, 5, 3, 6), (3, 6, 7)])]
    expected = np.einsum("aib,bjcd,cdk->aijk", *tensors)
    A, B, C = tensors[0], da.from_array(tensors[1], chunks=3), da.from_array(tensors[2], chunks=(2, 3, 4))
    network = distmm.einsum("aib,bjcd,cdk->aijk", A, B, C, client=client)
    np.testing.assert_array_equal(client.compute(network, sync=True), expected)
    out = np.zeros(expected.shape)
    assert distmm.einsum("aib,bjcd,cdk->aijk", A, B, C, client=client, out=out) is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("text", ["ij,jk->ki", "ij,ij->ij", "ij->ji", "ij,jk,kl->li"])
def test_out_receives_every_kind_of_result(text: str, tmp_path: Any) -> None:
    arrays = [whole_numbers((6, 6), "i4", n) for n in range(text.count(",") + 1)]
    expected = np.einsum(text, *arrays)
    file = zarr.create_array(tmp_path / "c.zarr", shape=(6, 6), chunks=(2, 3), dtype="i8")
    for out in (np.zeros((6, 6), "i8"), file, da.zeros((6, 6), chunks=4, dtype="i8")):
        assert distmm.einsum(text, *arrays, out=out) is out
        np.testing.assert_array_equal(out[:], expected)
    for number, array in enumerate(arrays):
        with pytest.raises(InputError, match=f"out shares memory with operand {number}"):
            distmm.einsum(text, *arrays, out=array)


# Vectors and refusals of multi_dot


@pytest.mark.parametrize("ends", [(3, 4), (None, 4), (3, None), (None, None)])
def test_the_ends_of_a_chain_may_be_vectors(ends: Sequence[int | None]) -> None:
    shapes = [(ends[0], 5), (5, 2), (2, 6), (6, ends[1])]
    arrays = [whole_numbers(tuple(n for n in shape if n), "i8", i) for i, shape in enumerate(shapes)]
    for chain in (arrays, [arrays[0], arrays[1] @ arrays[2] @ arrays[3]]):
        C = distmm.multi_dot([da.from_array(x, chunks=2) for x in chain])
        expected = np.linalg.multi_dot(chain)
        assert C.shape == np.shape(expected)
        np.testing.assert_array_equal(C.compute(), expected)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 4)], "multi_dot got 1 array: give two or more"),
        ([(3, 4), (4,), (4, 2)], r"array 1 has shape \(4,\): only the first and the last array may be vectors"),
        ([(2, 3, 4), (4, 2)], r"array 0 has shape \(2, 3, 4\)"),
        ([(3, 4), (5, 2)], r"array 0 has shape \(3, 4\) and array 1 \(5, 2\)"),
    ],
)
def test_what_is_no_chain_is_refused(shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        distmm.multi_dot([np.ones(shape) for shape in shapes])


# Refusals of einsum

A, B = np.ones((2, 3)), np.ones((3, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "einsum has no arguments"),
        (("ij,jk->ik", A), "are for 2 operands, and einsum got 1"),
        (("ij,jk->ik", A, B, B), "are for 2 operands, and einsum got 3"),
        (("ij,jk->iz", A, B), r"'ij,jk->iz', for shapes \[\(2, 3\), \(3, 4\)\]: Output character 'z' did not appear"),
        (("ij,jk->ii", A, B), "Output character 'i' appeared more than once"),
        (("...ij,jk->...i...", A[None], B), "appeared more than once in the output"),
        (
            ("ij,jk->ik", A, A),
            r"index 'j' of 'ij,jk' has length 2 in dimension 0 of operand 1, .* \[\(2, 3\), ",
        ),
        (("ii", A), "index 'i' of 'ii' has length 3 in dimension 1 of operand 0"),
        (("ii", A[:1]), "index 'i' of 'ii' has length 3 in dimension 1 of operand 0"),
        (("ijk,jk->ik", A, B), r"operand 0 of 'ijk,jk->ik' has shape \(2, 3\), 2 dimensions, .* name 3"),
        (("i,jk->ik", A, B), r"operand 0 of 'i,jk->ik' has shape \(2, 3\), 2 dimensions, .* name 1"),
        (("ijk...->ik", A), "Ellipses lengths do not match"),
        (("...i...", A), "Invalid Ellipses"),
        (("...j,jk->k", A, B), "an ellipsis in '...j,jk->k' stands for dimensions that the output lacks"),
        (("...ij,jk - > ik", A[None], B), "an ellipsis in '...ij,jk - > ik' stands for dimensions"),
        (("ij,jk->i,k", A, B), "'ij,jk->i,k' are for 3 operands, and einsum got 2"),
        (("...,...", A, B), r"index '.' of '..,..' has length 3 in dimension 0 of operand 1"),
        (("i.j,jk", A, B), "'i.j,jk', for shapes .*: Invalid Ellipses"),
        (("ij->ji->", A), "can only contain one '->'"),
        ((A, [0, 1], B, "jk"), "give subscripts such as 'ij,jk->ik' first, or a list of indices"),
        ((A, B), "give subscripts such as 'ij,jk->ik' first, or a list of indices"),
        ((A, [0, 1j], B, [1, 2]), "hashable and comparable"),
        ((A, [0, 1], B, [1, 2], [0, 5]), r"cannot use the indices .* KeyError\(5\)"),
        (("ij->ij", A.astype(object)), "operand 0: matrices of dtype object cannot be multiplied here"),
        (("ij,jk", A, np.ma.ones((3, 4))), "operand 1 has blocks of type MaskedArray"),
        (("ij,jk", A, "B"), "operand 1 is a str of builtins"),
    ],
)
def test_bad_subscripts_and_operands_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        distmm.einsum(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["ijk,kl->ijl", "aij,akj->aik", "ijk,kjl->li", "iij,jk,k->i", "ij,ij->i"])
def test_gpus_contract_cupy_blocks(text: str) -> None:
    import cupy

    sizes = {"a": 3, "i": 40, "j": 30, "k": 20, "l": 50}
    terms = text.partition("->")[0].split(",")
    arrays = [whole_numbers(tuple(sizes[x] for x in term), "f4", n) for n, term in enumerate(terms)]
    on_gpu = [cupy.asarray(x) for x in arrays]
    for operands in (on_gpu, [da.from_array(x, chunks=16, asarray=False) for x in on_gpu]):
        C = distmm.einsum(text, *operands).compute()
        assert isinstance(C, cupy.ndarray)
        np.testing.assert_array_equal(C.get(), np.einsum(text, *arrays))
