"""AdamW that may do without epsilon and may clip its own updates."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class StableAdamW(Optimizer):
    """AdamW (arXiv 1711.05101); without clipping and with eps > 0 it is `torch.optim.AdamW`.

    eps: 0 is allowed (Huginn, arXiv 2502.05171, section 4): where no squared gradient was ever seen, the update is 0.
    update_clipping: divide each tensor's rate by max(1, RMS(g / sqrt(v))), so that a gradient much larger than its
        average does not become a step as large (AdaFactor, arXiv 1804.04235; StableAdamW, arXiv 2304.13013).
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 0.0,
        weight_decay: float = 0.0, update_clipping: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "update_clipping": update_clipping},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # ty: ignore[incompatible-method-override]
        """Move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        step = state["step"].item()
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_()
        direction = _over(mean / (1 - beta1**step), root + group["eps"])
        if group["update_clipping"]:
            direction /= _over(grad, root).square().mean().sqrt().clamp(min=1)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The ratio, and 0 where the denominator is 0."""
    return (numerator / denominator).masked_fill_(denominator == 0, 0.0)
