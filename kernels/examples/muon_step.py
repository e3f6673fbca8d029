"""A step of the Muon optimiser: the gradient of a matrix is made orthogonal by five Newton-Schulz iterations.

Two of the three products of an iteration are symmetric, so `gram` computes them. Muon: Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/
"""

from __future__ import annotations

import torch

from distmm_kernels import gram, matmul

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the polynomial that moves all singular values towards 1


def orthogonal(gradient: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Return the gradient with all singular values near 1, in bfloat16."""
    a, b, c = COEFFICIENTS
    x = gradient.bfloat16() / (gradient.norm() + 1e-7)
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    for _ in range(iterations):
        square = gram(x)  # X X^T
        polynomial = gram(square, alpha=c, beta=b, c=square)  # b S + c S S^T, and S is symmetric
        x = matmul(polynomial, x, beta=a, c=x)  # a X + P X
    return x.T if turned else x


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is made orthogonal, for the matrices among a model's parameters."""

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Change each matrix along its orthogonal direction."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                kept = state.setdefault("momentum", torch.zeros_like(matrix))
                kept.mul_(group["momentum"]).add_(matrix.grad)
                scale = max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.add_(orthogonal(kept).to(matrix.dtype), alpha=-group["lr"] * scale)


def main() -> None:
    """Fit a matrix by Muon."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, truth = torch.randn(256, 64, device=device), torch.randn(64, 32, device=device)
    weights = torch.nn.Parameter(torch.zeros(64, 32, device=device))
    optimiser = Muon([weights])
    for turn in range(200):
        optimiser.zero_grad()
        loss = torch.nn.functional.mse_loss(x @ weights, x @ truth)
        loss.backward()
        optimiser.step()
        if turn % 50 == 0:
            print(f"step {turn}: loss {loss.item():.3g}")
    print(f"loss {loss.item():.3g}")
    singular = torch.linalg.svdvals(orthogonal(torch.randn(64, 32, device=device)).float())
    print(f"singular values of a direction from {singular.min().item():.2f} to {singular.max().item():.2f}")


if __name__ == "__main__":
    main()
