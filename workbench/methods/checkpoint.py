"""What a method writes into a Lightning checkpoint, and how it reads it back."""

from typing import Any

import torch
from torch import nn

from workbench.errors import UserError
from workbench.methods.optim import parameter_groups


def trained_names(module: nn.Module) -> set[str]:
    """Names of the trained parameters, those of tied ones included."""
    return {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}


def has_frozen(module: nn.Module) -> bool:
    """True if some parameters are not trained (an adapter on a frozen base)."""
    return any(not p.requires_grad for p in module.parameters())


def keep_trained(state_dict: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Only the entries that the base model cannot supply again."""
    if not has_frozen(module):
        return state_dict
    names = trained_names(module)
    return {key: value for key, value in state_dict.items() if key in names}


def check_trained(state_dict: dict[str, Any], module: nn.Module) -> None:
    """Raises `UserError` unless a checkpoint holds exactly the trained parameters, in their shapes."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    missing = sorted(shapes.keys() - state_dict.keys())
    extra = sorted(state_dict.keys() - shapes.keys()) if has_frozen(module) else []
    wrong = sorted(n for n, s in shapes.items() if n in state_dict and tuple(state_dict[n].shape) != s)
    for what, names in (("lacks", missing), ("has unknown", extra), ("has another shape for", wrong)):
        if names:
            raise UserError(
                f"the checkpoint {what} {len(names)} of the trained weights (first: {names[0]}); resume with the model "
                "and peft settings it was trained with (config.yaml beside it)."
            )


def optimizer_names(module: nn.Module) -> list[str]:
    """Parameter names in the order of the optimizer's groups: what its numeric ids stand for."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [names[id(p)] for group in parameter_groups(module) for p in group["params"]]


def ids_to_names(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Keys an optimizer state by parameter name, which means the same under every strategy."""
    names = optimizer_names(module)
    return {
        "state": {names[i]: value for i, value in state["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
    }


def names_to_ids(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """The inverse of `ids_to_names`, for this module's optimizer."""
    ids = {name: i for i, name in enumerate(optimizer_names(module))}
    return {
        "state": {ids[name]: value for name, value in state["state"].items()},
        "param_groups": [{**group, "params": [ids[n] for n in group["params"]]} for group in state["param_groups"]],
    }


def is_named(state: dict[str, Any]) -> bool:
    """True for an optimizer state keyed by parameter name."""
    groups = state.get("param_groups") or []
    return bool(groups) and all(isinstance(n, str) for g in groups for n in g["params"])


def total_norm(module: nn.Module, norm_type: float = 2.0) -> torch.Tensor:
    """Norm of all gradients as one vector; whole, also when they are sharded."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, norm_type)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
