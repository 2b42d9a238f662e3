"""Claim: on one H200 a ViT-B/32 of 8 models is merged by tsv (any rank), epimer and epimer_free within a second.

CLIP's image encoders: of B/32 and B/16 12 layers (48 matrices of 768 x 768, 12 of 3072 x 768, 12 of 768 x 3072), of
L/14 24 layers of 1024 and 4096, with patches, positions, biases and norms; 8 models in float32 on the card, whose task
vectors have singular values i^-0.7; rank 32 but where the row says otherwise. Every row goes through
`merge_state_dicts` with the library's defaults; the first run of each is left out, since it loads the card's libraries.
The difference is that of the first layer's merged delta from the same merge in float64 on the card. The paper's own
seconds are EpiMer's on a 3090 Ti: another card, and nothing is claimed of the ratio.

    python benchmarks/faster_on_gpu.py [--variant L/14] [--device cuda] [--layers N] [--only NAME] [--no-difference]
        [--json FILE]

Needs torch and epimer, nothing else. A row that fails says so, and the others go on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from faster_than_fusionbench import LAYER, RANK, TASKS, State, difference
from result_file import write_result

import epimer

VARIANTS = {"B/32": (768, 12, 32), "B/16": (768, 12, 16), "L/14": (1024, 24, 14)}  # width, layers, side of a patch
PAPER = {"B/32": 37.9, "B/16": 39.0, "L/14": 119.8}  # seconds of EpiMer there

CASES: dict[str, tuple[str, dict[str, Any], str | None, float | None]] = {
    # row: method, options, curvature, the seconds that are claimed
    "average": ("average", {}, None, None),
    "iso_c": ("iso_c", {}, None, None),
    "tsv": ("tsv", {"rank": RANK}, None, 1),
    "tsv, default rank": ("tsv", {}, None, 1),
    "epimer": ("epimer", {"rank": RANK}, "diagonal", 1),
    "epimer_free": ("epimer_free", {"rank": RANK}, None, 1),
    "epimer_kron": ("epimer_kron", {"rank": RANK}, "kronecker", 2),
    "epimer_kron, 40 steps": ("epimer_kron", {"rank": RANK, "iterations": 40}, "kronecker", 2),
}


class Models:
    """Random models on a device, and curvature for them."""

    def __init__(self, layers: int, device: str, width: int = 768, patch: int = 32) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.device = device
        self.shapes = {f"layers.{i}.{name}.weight": tuple(side * width // 768 for side in shape)
                       for i in range(layers) for name, shape in LAYER.items()}  # fmt: skip
        others: dict[str, tuple[int, ...]] = {"patches.weight": (width, 3, patch, patch)}
        others["position_embedding.weight"] = ((224 // patch) ** 2 + 1, width)
        for name, (outputs, _) in self.shapes.items():
            others[f"vectors.{name}.bias"] = (outputs,)
        for i in range(2 * layers + 2):
            others |= {f"vectors.norm.{i}.weight": (width,), f"vectors.norm.{i}.bias": (width,)}
        self.base = {name: 0.02 * self.draw(*shape) for name, shape in (self.shapes | others).items()}
        self.models = [{name: W + (self.task_vector(*W.shape) if name in self.shapes else 0.01 * self.draw(*W.shape))
                        for name, W in self.base.items()} for _ in range(TASKS)]  # fmt: skip

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def orthonormal(self, m: int, n: int) -> torch.Tensor:
        return torch.linalg.qr(self.draw(m, n)).Q

    def task_vector(self, m: int, n: int) -> torch.Tensor:
        """Return a task vector with σ_i = i^-0.7."""
        side = min(m, n)
        sigma = torch.arange(1, side + 1, device=self.device) ** -0.7
        return (self.orthonormal(m, side) * sigma) @ self.orthonormal(n, side).T

    def factor(self, size: int) -> torch.Tensor:
        """Return a Kronecker factor: 256 samples with a falling spectrum, some of it everywhere."""
        x = self.draw(256, size) * torch.arange(1, size + 1, device=self.device) ** -0.5
        gram = x.T @ x / len(x)
        return gram + 1e-3 * gram.diagonal().mean() * torch.eye(size, device=self.device)

    def curvature(self, kind: str) -> list[dict[str, Any]]:
        """Return curvature of every model: squared gradients of 64 samples, or Kronecker factors."""
        if kind == "kronecker":
            return [{name: epimer.Kronecker(G=self.factor(m), A=self.factor(n))
                     for name, (m, n) in self.shapes.items()} for _ in range(TASKS)]  # fmt: skip
        return [{name: epimer.Diagonal(self.fisher(*shape)) for name, shape in self.shapes.items()}
                for _ in range(TASKS)]  # fmt: skip

    def fisher(self, m: int, n: int) -> torch.Tensor:
        g, x = self.draw(64, 16, m) * self.draw(m).exp(), self.draw(64, 16, n) * self.draw(n).exp()
        total = torch.zeros(m, n, device=self.device)
        for gs, xs in zip(g, x, strict=True):
            total += (gs.T @ xs).square()
        return total / len(g)


def wait(device: str) -> None:
    """Wait until the device has done all it was asked for."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(device: str, repeats: int, *given: Any, **options: Any) -> tuple[float, State]:
    """Return the shortest time of a merge after a first run, and its result."""
    merged = epimer.merge_state_dicts(*given, **options)
    seconds = float("inf")
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        merged = epimer.merge_state_dicts(*given, **options)
        wait(device)
        seconds = min(seconds, time.perf_counter() - start)
    return seconds, merged


def main() -> None:
    """Time every row and print seconds and differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where tensors are, and merges run")
    parser.add_argument("--variant", choices=VARIANTS, default="B/32")
    parser.add_argument("--layers", type=int, help="of the model, instead of the variant's")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs; the shortest counts")
    parser.add_argument("--only", action="append", help="rows whose name begins so; may be repeated")
    parser.add_argument("--no-difference", action="store_true", help="leave out the float64 merges")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("there is no GPU here; --device cpu --layers 1 tries the script")
        return
    width, layers, patch = VARIANTS[options.variant]
    layers = options.layers or layers
    models = Models(layers, options.device, width, patch)
    kept = {row: case for row, case in CASES.items() if not options.only or row.startswith(tuple(options.only))}
    curvatures: dict[str, Any] = {}
    card = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    about = {"device": card, "variant": options.variant,
             "layers": layers, "paper_3090ti_s": PAPER[options.variant], "tasks": TASKS, "rank": RANK}  # fmt: skip
    rows: list[dict[str, Any]] = []
    for row, (method, given, kind, claimed) in kept.items():
        claimed = claimed if options.variant == "B/32" else None
        if kind and kind not in curvatures:
            curvatures = {kind: models.curvature(kind)}  # and not the last one's, which takes as much of the card
        curvature = curvatures.get(kind or "")
        try:
            seconds, merged = timed(options.device, options.repeats, models.base, models.models, method,
                                    curvature=curvature, **given)  # fmt: skip
            apart = None if options.no_difference else difference(models, merged, method, given, curvature)
        except (RuntimeError, epimer.EpimerError) as error:
            rows.append({"row": row, "error": str(error).splitlines()[0]})
            print(f"{row:<26} failed: {rows[-1]['error']}", flush=True)
            continue
        name = f"{options.variant} {row}"
        rows.append({"row": row, "seconds": seconds, "claimed_s": claimed, "difference": apart})
        text = f"{name:<30}{seconds:8.3f} s" + (f" (claimed {claimed:g} s)" if claimed else "")
        print(text + (f"   difference {apart:.1e}" if apart is not None else ""), flush=True)
        if options.json:
            write_result(options.json, {**about, "rows": rows}, seed=0)


if __name__ == "__main__":
    main()
