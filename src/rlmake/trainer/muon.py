"""Muon: momentum, orthogonalised by Newton–Schulz, for the matrices of a model; AdamW for the rest.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ (coefficients, nesterov). The factor
0.2·√max(rows, columns), which gives an update the root mean square of AdamW's, is from Liu et al. 2025,
https://arxiv.org/abs/2502.16982.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

STEPS, A, B, C = 5, 3.4445, -4.7750, 2.0315
ADAMW_NAMES = ("lm_head", "embed_tokens")


def is_matrix(name: str, p: Tensor) -> bool:
    """Muon's share: two dimensions or more, and neither embedding nor head."""
    return p.ndim >= 2 and not any(part in ADAMW_NAMES for part in name.split("."))


def orthogonalise(matrix: Tensor) -> Tensor:
    """Newton–Schulz iteration towards U·Vᵀ of `matrix` [rows, columns]; bf16 on a GPU, fp32 on a CPU.

    Stacked experts [E, rows, columns] are a matrix each.
    """
    if matrix.ndim == 3:
        return torch.stack([orthogonalise(one) for one in matrix])
    x = matrix
    x = x.bfloat16() if x.is_cuda else x.float()
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    x = x / (x.norm() + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return (x.T if flip else x).reshape(matrix.shape).to(matrix.dtype)


class Muon(Optimizer):
    """`mu`: Muon's momentum. `betas`, `eps`: of the AdamW part. Weight decay is decoupled in both."""

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        lr: float,
        weight_decay: float,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        matrices = [p for name, p in named if is_matrix(name, p)]
        others = [p for name, p in named if not is_matrix(name, p)]
        groups = [{"params": matrices, "matrix": True}, {"params": others, "matrix": False}]
        defaults = {"lr": lr, "weight_decay": weight_decay, "mu": mu, "betas": betas, "eps": eps}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1.0 - group["lr"] * group["weight_decay"])
                    (self._matrix if group["matrix"] else self._adamw)(p, group)

    def _matrix(self, p: nn.Parameter, group: dict) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"].lerp_(p.grad, 1.0 - group["mu"])
        direction = p.grad.lerp(buffer, group["mu"])  # nesterov
        whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
        scale = 0.2 * max(whole.shape[-2:]) ** 0.5
        update = orthogonalise(whole) * scale
        if isinstance(p, DTensor):
            update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
        p.add_(update, alpha=-group["lr"])

    def _adamw(self, p: nn.Parameter, group: dict) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        (beta1, beta2), n = group["betas"], state["step"].item()
        state["exp_avg"].lerp_(p.grad, 1.0 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)
        root = state["exp_avg_sq"].sqrt().div_((1.0 - beta2**n) ** 0.5).add_(group["eps"])
        p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1.0 - beta1**n))
