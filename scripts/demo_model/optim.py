"""Muon for the matrices, AdamW for the rest, and the step-based schedule."""

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan's coefficients


def orthogonalised(x: Tensor, steps: int) -> Tensor:
    """The nearest semi-orthogonal matrix to each of x [..., R, C], roughly; leading dimensions are a batch."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum made orthogonal, scaled so that its root mean square is that of an AdamW update."""

    def __init__(
        self, weights: list[nn.Parameter], lr: float, decay: float, momentum: float = 0.95, steps: int = 5
    ) -> None:
        super().__init__(weights, {"lr": lr, "decay": decay, "momentum": momentum, "steps": steps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalised(weight.grad.lerp(mean, group["momentum"]).bfloat16(), group["steps"])
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * max(weight.shape[-2:]) ** 0.5)


def is_muons(name: str, weight: nn.Parameter) -> bool:
    """Muon takes the matrices, except the embedding and the routers."""
    return weight.ndim > 1 and "embed" not in name and not name.endswith("mlp.gate.weight")


def optimizers(model: nn.Module, lr: float, adam_lr: float, threads: int) -> list[torch.optim.Optimizer]:
    """A Muon for each thread, of every ``threads``-th matrix, and one AdamW; ``peak_lr`` is what the schedule scales."""
    muons = [w for name, w in model.named_parameters() if is_muons(name, w)]
    rest = [w for name, w in model.named_parameters() if not is_muons(name, w)]
    adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    found = [*(Muon(muons[thread::threads], lr, decay=0.1) for thread in range(threads)), adam]
    for optimizer in found:
        optimizer.param_groups[0]["peak_lr"] = optimizer.param_groups[0]["lr"]
    return found


def schedule(step: int, steps: int, decay_steps: int, warmup_steps: int = 100) -> float:
    """Warm up, stay, then fall to zero as 1 - sqrt(t); what comes before the decay does not depend on ``steps``."""
    into_decay = (step - (steps - decay_steps)) / decay_steps
    return min((step + 1) / warmup_steps, 1.0) * (1.0 if into_decay <= 0 else 1.0 - into_decay**0.5)
