"""The QR of a tall block: orthogonal to the precision of its type, also where its columns are nearly dependent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distmm.worker.tasks import tall_qr

rng = np.random.default_rng(4)

BLOCKS = {
    "any": rng.standard_normal((300, 20)),
    "columns of all sizes": rng.standard_normal((300, 20)) * 10.0 ** -np.arange(20),
    "nearly dependent": 1 + 1e-7 * rng.standard_normal((300, 20)),
    "large": 1e30 * rng.standard_normal((300, 20)),
    "square": rng.standard_normal((20, 20)),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", ["f4", "c8", "f8"])
def test_q_is_orthogonal_and_qr_is_the_block(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tall_qr, "PIECE", 64 * 20)
    block = (BLOCKS[name] * (1 + 0.5j if dtype == "c8" else 1)).astype(dtype)
    q, r = tall_qr.block_qr(block, 1)
    assert (q.dtype, r.dtype, q.shape, r.shape) == (block.dtype, block.dtype, block.shape, (20, 20))
    np.testing.assert_array_equal(r, np.triu(r))
    scale, eps = np.linalg.norm(block.astype("c16"), axis=0).max(), np.finfo(dtype).eps
    wide: Any = q.astype(np.result_type(dtype, "f8"))
    assert np.abs(wide.conj().T @ wide - np.eye(20)).max() < 20 * eps
    assert np.abs(wide @ r - block).max() < 20 * eps * scale


def test_only_well_conditioned_blocks_of_four_bytes_are_decomposed_by_their_gram_matrix() -> None:
    found = {name: tall_qr._by_gram(block.astype("f4")) is not None for name, block in BLOCKS.items()}
    assert found == {name: name not in ("columns of all sizes", "nearly dependent") for name in BLOCKS}
    assert tall_qr._by_gram(np.zeros((9, 2), "f4")) is None
    assert tall_qr._by_gram(np.full((9, 2), np.nan, "f4")) is None
