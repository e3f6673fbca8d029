"""A situation of `situations.py`: expressions of products and of what precedes and follows them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import dask.array as da
from users_products import Products, Setting, accelerated


def expressions(setting: Setting) -> Products:
    """Expressions of persisted arrays, as Dask computes them and with `distmm.accelerated()`; results are fetched."""
    rows, width, few = setting.size(1_000_000), setting.size(1024), setting.size(128)
    with setting.started():
        X = setting.normal((rows, width), (-(-rows // 16), width))
        y, v = setting.normal((rows,), -(-rows // 16)), setting.normal((width,), -1)
        W, V = setting.normal((width, width), -1), setting.normal((width, few), -1)
        S = setting.normal((setting.size(8192),) * 2, setting.size(4096))
        Z = setting.normal((setting.size(32_768), setting.size(512)), (setting.size(4096), -1))
        Q, K, U = (setting.normal((16, setting.size(2048), few), (1, -1, -1)) for _ in range(3))

        def gradients() -> da.Array:
            w = v
            for _ in range(3):
                w = w - 1e-8 * (X.T @ (X @ w - y))
            return w

        def power() -> da.Array:
            w = v
            for _ in range(5):
                w = X.T @ (X @ w)
                w = w / da.sqrt((w * w).sum())
            return w

        def newton_schulz() -> da.Array:
            step = S / da.sqrt((S * S).sum())
            for _ in range(2):
                step = 1.5 * step - 0.5 * (step @ step.T) @ step
            return step.sum()

        def distances() -> da.Array:
            return ((X * X).sum(axis=1)[:, None] - 2 * (X @ W) + (W * W).sum(axis=0)).min(axis=1)

        def softmax() -> da.Array:
            weights = da.exp(X @ V - 100)
            return (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)

        def attention() -> da.Array:
            weights = da.exp(Q @ K.transpose(0, 2, 1) / 10)
            return ((weights / weights.sum(axis=-1, keepdims=True)) @ U).sum(axis=1)

        def cosines() -> da.Array:
            unit = Z / da.sqrt((Z * Z).sum(axis=1, keepdims=True))
            return (unit @ unit.T).max(axis=1)

        made: dict[str, Callable[[], da.Array]] = {
            "X.T @ y": lambda: X.T @ y,
            "three steps of a linear regression": gradients,
            "five power iterations": power,
            "two steps of Newton-Schulz, n = 8192": newton_schulz,
            "nearest of 1024 centres": distances,
            "columns of a softmax of X @ V": softmax,
            "relu of X @ W + v": lambda: da.maximum(X @ W + v, 0).sum(axis=0),
            "(X @ V).max(axis=1)": lambda: (X @ V).max(axis=1),
            "X @ W @ V": lambda: (X @ W @ V).sum(axis=0),
            "attention, 16 x 2048 x 128": attention,
            "exp(-(Z @ Z.T)).sum()": lambda: da.exp(-(Z @ Z.T) / 1000).sum(),
            "largest cosine of each row of Z": cosines,
        }
        for name, expression in made.items():
            dasks = partial(fetched, expression)
            yield name, {"distmm": partial(accelerated, dasks), "Dask": dasks}


def fetched(expression: Callable[[], da.Array]) -> None:
    """Make an expression and compute it, to an array of this process."""
    expression().compute()
