"""Optimisers as values, and the parameter groups that they move, proved complete."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from looplm.training.adam import StableAdamW
from looplm.training.adapters import is_adapter
from looplm.training.eight_bit import eight_bit_adamw

Role = Literal["matrices", "tables", "vectors", "gate"]
_GATE = "model.exit_gate."
_LOOPED = ("model.prelude.", "model.core.", "model.coda.", "model.injection.")


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """AdamW for all that is trained; weight decay moves matrices only.

    eps: 0 is Adam without epsilon (Huginn, arXiv 2502.05171).
    gate_lr: the exit gate's own rate; `lr` by default.
    update_clipping: see `StableAdamW`.
    bits: 8 holds the moments in 8 bits (see `eight_bit_adamw`); not under FSDP.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["adamw"] = "adamw"
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    gate_lr: float | None = None
    update_clipping: bool = False
    bits: Literal[8, 32] = 32

    def __post_init__(self) -> None:
        _refuse_rates(self.lr, self.weight_decay)
        if self.gate_lr is not None and self.gate_lr <= 0:
            raise ValueError(f"gate_lr={self.gate_lr} must be above 0; leave it out for the common rate")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={list(self.betas)} must lie between 0 and 1, 1 excluded")
        if self.eps < 0:
            raise ValueError(f"eps={self.eps} must not be negative; 0 is Adam without epsilon")
        if self.bits == 8 and (self.eps == 0 or self.update_clipping):
            raise ValueError("bits=8 goes with eps above 0 and without update_clipping; take bits=32")


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """Muon (PyTorch's own) for the matrices of the blocks and the injection, AdamW for all else.

    Embeddings, head, gate, norms, biases and adapters are Adam's. The default rates are those of retrofitted recurrence
    (arXiv 2511.07384): 1e-3 and 5e-5.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["muon"] = "muon"
    lr: float = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.1
    adam: AdamWSettings = field(default_factory=lambda: AdamWSettings(lr=5e-5))

    @property
    def bits(self) -> int:
        """Of the moments, the fewest that any parameter has."""
        return self.adam.bits

    def __post_init__(self) -> None:
        _refuse_rates(self.lr, self.weight_decay)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} must lie between 0 and 1, 1 excluded")


OptimizerSettings = AdamWSettings | MuonSettings


def build_optimizers(
    model: nn.Module, settings: OptimizerSettings, trains: Callable[[str], bool]
) -> tuple[Optimizer, ...]:
    """The optimisers of the parameters that `trains` names; all others are frozen.

    Every group carries its role as `name` and its peak rate as `base_lr`, which a schedule multiplies into `lr`.

    Raises:
        ValueError: if nothing is trained, or Muon has no matrix to train.
    """
    roles: dict[Role, list[Tensor]] = {"matrices": [], "tables": [], "vectors": [], "gate": []}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
        if parameter.requires_grad:
            roles[role(name, parameter)].append(parameter)
    if not any(roles.values()):
        raise ValueError("the objective trains no parameter of this model; choose another objective or model")
    optimizers = (_adam(roles, settings),) if isinstance(settings, AdamWSettings) else _muon(roles, settings)
    check_groups(model, optimizers)
    return optimizers


def role(name: str, parameter: Tensor) -> Role:
    """What an optimiser sees in a parameter of this name.

    "matrices" are those of the blocks and the injection; "tables" embeddings, head and adapters; "vectors" norms and
    biases; the gate counts apart, its one row included.
    """
    if name.startswith(_GATE):
        return "gate"
    if parameter.ndim < 2:
        return "vectors"
    return "matrices" if name.startswith(_LOOPED) and not is_adapter(name) else "tables"


def check_groups(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Prove that each trainable parameter lies in exactly one group, tied ones once, and nothing else in any.

    Raises:
        AssertionError: naming the first parameter of which that is not so.
    """
    held = Counter(id(parameter) for opt in optimizers for group in opt.param_groups for parameter in group["params"])
    for name, parameter in model.named_parameters():
        times, wanted = held.pop(id(parameter), 0), int(parameter.requires_grad)
        assert times == wanted, f"parameter {name} is in {times} optimiser groups; expected {wanted}"
    assert not held, f"the optimisers hold {len(held)} parameters that are not the model's"


def _adam(roles: dict[Role, list[Tensor]], settings: AdamWSettings) -> Optimizer:
    decays = {"matrices": settings.weight_decay, "tables": settings.weight_decay, "vectors": 0.0, "gate": 0.0}
    groups = [
        _group(name, parameters, (name == "gate" and settings.gate_lr) or settings.lr, decays[name])
        for name, parameters in roles.items()
        if parameters
    ]
    common: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if settings.bits == 8:
        return eight_bit_adamw(groups, **common)
    if settings.eps == 0 or settings.update_clipping:
        return StableAdamW(groups, update_clipping=settings.update_clipping, **common)
    return AdamW(groups, **common)


def _muon(roles: dict[Role, list[Tensor]], settings: MuonSettings) -> tuple[Optimizer, ...]:
    matrices = roles["matrices"]
    if not matrices:
        raise ValueError("kind='muon' trains matrices of the blocks, and none is trained here; take kind='adamw'")
    groups = [_group("matrices", matrices, settings.lr, settings.weight_decay)]
    muon = Muon(groups, lr=settings.lr, momentum=settings.momentum)
    others: dict[Role, list[Tensor]] = {name: held for name, held in roles.items() if name != "matrices"}
    return (muon, _adam(others, settings.adam)) if any(others.values()) else (muon,)


def _group(name: str, parameters: list[Tensor], lr: float, weight_decay: float) -> dict[str, Any]:
    return {"params": parameters, "name": name, "lr": lr, "base_lr": lr, "weight_decay": weight_decay}


def _refuse_rates(lr: float, weight_decay: float) -> None:
    if lr <= 0:
        raise ValueError(f"lr={lr} must be above 0")
    if weight_decay < 0:
        raise ValueError(f"weight_decay={weight_decay} must not be negative")
