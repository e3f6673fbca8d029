"""float32 at tensor-core speed in an existing PyTorch model: its linear layers multiply by `distmm_kernels.matmul`.

Results keep the accuracy of float32 (``precision="highest"``), unlike TF32. Gradients and ``torch.compile`` work, since
the product is a registered operator.
"""

from __future__ import annotations

import torch

from distmm_kernels import matmul


class Linear(torch.nn.Linear):
    """A linear layer whose products, forward and backward, are computed by `matmul`."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs W^T + bias``."""
        rows = inputs.reshape(-1, self.in_features)
        return matmul(rows, self.weight.T, c=self.bias).reshape(*inputs.shape[:-1], self.out_features)


def accelerated(model: torch.nn.Module) -> torch.nn.Module:
    """Let all linear layers of a model multiply by `matmul`, and return the model. Weights stay as they are."""
    for layer in model.modules():
        if type(layer) is torch.nn.Linear:
            layer.__class__ = Linear
    return model


def main() -> None:
    """Train a small model with and without, and compare the results."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8)).to(device)
    ours = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8)).to(device)
    ours.load_state_dict(plain.state_dict())
    x, y = torch.randn(32, 16, 64, device=device), torch.randn(32, 16, 8, device=device)
    for model in (plain, accelerated(ours)):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimiser.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimiser.step()
    difference = max((p - q).abs().max().item() for p, q in zip(plain.parameters(), ours.parameters(), strict=True))
    print(f"after 20 steps the weights differ by {difference:.1e}")


if __name__ == "__main__":
    main()
