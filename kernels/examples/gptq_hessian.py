"""The Hessian of GPTQ, ``H = 2 / N sum X^T X`` over batches of a layer's inputs, accumulated in place.

GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323) quantises a layer by the inverse of this matrix. The inputs
are bfloat16 and H is float32: no product is rounded to 16 bits.
"""

from __future__ import annotations

import torch

from distmm_kernels import gram, verify


class Hessian:
    """The sum over all batches so far.

    Parameters
    ----------
    layer
        Its inputs are observed while this object is in a ``with`` statement.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        n = layer.in_features
        self.layer, self.rows = layer, 0
        self.sum = torch.zeros(n, n, device=layer.weight.device)

    def __enter__(self) -> Hessian:
        self._hook = self.layer.register_forward_pre_hook(lambda _, inputs: self.add(inputs[0]))
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    @torch.no_grad()
    def add(self, inputs: torch.Tensor) -> None:
        """Add a batch of inputs ``(..., n)``."""
        x = inputs.reshape(-1, inputs.shape[-1])
        gram(x.T, out=self.sum, c=self.sum)  # H += X^T X
        self.rows += len(x)

    def value(self) -> torch.Tensor:
        """Return H."""
        return self.sum * (2 / self.rows)


def main() -> None:
    """Accumulate the Hessian of a layer over some batches, and compare it with the product of all of them."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)).to(device).bfloat16()
    batches = [torch.randn(8, 16, 48, device=device).bfloat16() for _ in range(4)]
    with Hessian(model[2]) as hessian, torch.no_grad():
        for batch in batches:
            model(batch)
    with torch.no_grad():
        x = torch.cat([model[:2](batch).reshape(-1, 64) for batch in batches]).float()
    check = verify(x.T, x, hessian.sum)
    print(check)
    print("rows", hessian.rows, "right" if check else "wrong")


if __name__ == "__main__":
    main()
