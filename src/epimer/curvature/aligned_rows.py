"""Curvature whose rows of embeddings and heads follow the same tokens as the rows of an aligned checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from epimer.checkpoints.vocabulary import Aligned
from epimer.curvature.curvature import Curvature
from epimer.errors import CurvatureError
from epimer.geometry.metric import Diagonal, Kronecker, Metric


def follow_rows(curvature: Curvature, checkpoint: Aligned) -> Curvature:
    """Return a model's curvature with the rows of its tables in the order of the checkpoint's."""
    aligned = Curvature(
        AlignedMetrics(curvature, checkpoint),
        curvature.provenance,
        where=curvature.where,
        inputs=lambda: curvature.inputs,
    )
    aligned.file = curvature.file
    return aligned


class AlignedMetrics(Mapping[str, Metric]):
    """Metrics by tensor; those of tables have the checkpoint's rows, and 0 for tokens that the model does not know.

    A row that stands for such a token is another model's, and the task's loss does not depend on it.
    """

    def __init__(self, curvature: Curvature, checkpoint: Aligned) -> None:
        self.curvature, self.metrics, self.checkpoint = curvature, curvature.metrics, checkpoint
        own = [next((i for one, i in origin if one is checkpoint.source), -1) for origin in checkpoint.origins]
        self.rows = torch.tensor(
            [i if len(origin) == 1 else -1 for i, origin in zip(own, checkpoint.origins, strict=True)]
        )

    def __getitem__(self, name: str) -> Metric:
        metric = self.metrics[name]
        if (known := self._known(name)) is None:
            return metric
        if isinstance(metric, Diagonal):
            return Diagonal(self._taken(metric.F, known, name))
        if isinstance(metric, Kronecker) and metric.inputs == 1 and metric.G is not None:
            rows = self._taken(metric.G, known, name)
            return replace(metric, G=self._taken(rows.T.contiguous(), known, name))
        raise self._refusal(name)

    def size(self, name: str) -> int:
        """Return about how many bytes a tensor's curvature has; refuse one that cannot be aligned."""
        size, known = self.curvature.size(name), self._known(name)
        if known is None:
            return size
        if self.curvature.kind not in (Diagonal.kind, Kronecker.kind):
            raise self._refusal(name)
        return int(size * (len(self.rows) / known) ** (1 if self.curvature.kind == Diagonal.kind else 2))

    def _known(self, name: str) -> int | None:
        """Return how many rows the model's own table of this name has; None where it is no table."""
        ties = self.curvature.provenance.ties
        names = (name, *(other for other, twin in ties.items() if twin == name))
        table = next((one for one in names if one in self.checkpoint.tables), None)
        return None if table is None else self.checkpoint.source.headers[table].shape[0]

    def _taken(self, M: Tensor, known: int, name: str) -> Tensor:
        if len(M) != known:
            problem = f"{self.curvature.where} has {len(M)} rows for {name!r}, but the model has {known} tokens"
            raise CurvatureError(f"{problem}; measure it on this model.")
        chosen = M[self.rows.clamp_min(0)]
        chosen[self.rows < 0] = 0
        return chosen

    def _refusal(self, name: str) -> CurvatureError:
        problem = f"rows of {name!r} are aligned by token, which its {self.curvature.kind} curvature cannot be"
        return CurvatureError(f"{problem}; give it the rule 'average', or measure diagonal curvature.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)
