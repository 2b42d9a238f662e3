"""Merge small models made on the spot with every method, and print how near each merge stays to every task.

Each task is a regression whose inputs live mostly in a few directions of their own; its model is fine-tuned from one
ancestor by gradient descent. The table shows each task's loss under the merged model, on a scale where 1 is the
ancestor and 0 the task's own fine-tuned model.
"""

from __future__ import annotations

import time

import torch

import epimer

TASKS, OUT, IN, SAMPLES = 4, 48, 64, 256
SCALES = (0.25, 0.5, 1.0, 1.5)


def main() -> None:
    """Make the models, merge them with every method and print a table."""
    torch.manual_seed(0)
    base = {"layer.weight": torch.randn(OUT, IN) / IN**0.5, "layer.bias": torch.zeros(OUT)}
    tasks = [make_task(base) for _ in range(TASKS)]
    models = [fine_tune(base, x, y) for x, y in tasks]
    before = [loss(base, x, y) for x, y in tasks]
    after = [loss(model, x, y) for model, (x, y) in zip(models, tasks, strict=True)]

    def kept(state: dict[str, torch.Tensor]) -> list[float]:
        return [
            (loss(state, x, y) - best) / (start - best)
            for (x, y), start, best in zip(tasks, before, after, strict=True)
        ]

    curvature = {kind: [measure(x, y, kind) for x, y in tasks] for kind in ("diagonal", "kronecker", "samples")}
    print(f"{TASKS} models of one ancestor, one {OUT} x {IN} layer; loss left per task, 1 = ancestor, 0 = fine-tuned")
    print(f"scale is the best of {', '.join(map(str, SCALES))} on these tasks\n")
    print(f"{'method':<18}{'mean':>7}{'worst':>7}{'scale':>7}   {'per task':<28}{'ms':>6}")
    rows = []
    for name in epimer.list_methods():
        method = epimer.describe_method(name)
        if not method.models[0] <= TASKS <= (method.models[1] or TASKS):
            continue  # merges two models, or one
        options = {"evaluate": lambda state: -sum(kept(state))} if name == "greedy_soup" else {}
        options |= {"curvature": curvature[method.curvature]} if method.needs_curvature else {}
        options |= {"rank": 8} if any(p.name == "rank" for p in method.parameters) else {}
        start = time.perf_counter()
        tried = [(kept(epimer.merge_state_dicts(base, models, name, scale=s, **options)), s) for s in SCALES]
        left, scale = min(tried, key=lambda pair: sum(pair[0]))
        rows.append(
            (sum(left) / TASKS, max(left), scale, left, name, 1e3 * (time.perf_counter() - start) / len(SCALES))
        )
    for mean, worst, scale, left, name, ms in sorted(rows):
        print(f"{name:<18}{mean:7.2f}{worst:7.2f}{scale:7.2f}   {' '.join(f'{x:6.2f}' for x in left):<28}{ms:6.0f}")
    total = epimer.diagnose_state_dicts(base, models, curvature=curvature["kronecker"], rank=8).total
    print(
        f"\nbefore any merge: curvature can remove {total.eta_fraction:.0%} of the flat mean's conflict; "
        f"8 directions per task keep {total.energy_kept:.0%} of the task vectors"
    )
    print("a linear layer under squared loss is the case where Kronecker curvature is exact: expect less elsewhere")
    print("next: epimer.describe_method('epimer_kron') tells what a method needs; docs/methods.md lists them all")


def make_task(base: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs that live mostly in a few directions, and targets a few directions away from the ancestor's."""
    mixing = torch.linalg.qr(torch.randn(IN, IN)).Q * torch.logspace(0, -4, IN)
    x = torch.randn(SAMPLES, IN) @ mixing.T * 3
    change = torch.randn(OUT, 4) @ torch.randn(4, IN) / IN**0.5
    return x, x @ (base["layer.weight"] + change).T + 0.1 * torch.randn(SAMPLES, OUT)


def fine_tune(base: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run gradient descent from the ancestor."""
    state = {name: tensor.clone().requires_grad_() for name, tensor in base.items()}
    optimiser = torch.optim.Adam(state.values(), lr=0.02)
    for _ in range(200):
        optimiser.zero_grad()
        torch.nn.functional.mse_loss(x @ state["layer.weight"].T + state["layer.bias"], y).backward()
        optimiser.step()
    return {name: tensor.detach() for name, tensor in state.items()}


def loss(state: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the mean squared error."""
    return float(torch.nn.functional.mse_loss(x @ state["layer.weight"].T + state["layer.bias"], y))


def measure(x: torch.Tensor, y: torch.Tensor, kind: str) -> dict[str, object]:
    """Return the layer's curvature: a sample's gradient is g xᵀ, with g drawn from the model's own prediction."""
    g = torch.randn(y.shape)
    if kind == "diagonal":
        return {"layer.weight": epimer.Diagonal(g.square().T @ x.square() / len(x))}
    if kind == "kronecker":
        return {"layer.weight": epimer.Kronecker(A=x.T @ x / len(x), G=g.T @ g / len(g))}
    return {"layer.weight": epimer.Samples(g=g[:, None], x=x[:, None])}


if __name__ == "__main__":
    main()
