"""The model card: what was merged, how, by which method, and how it went."""

from __future__ import annotations

import re
from collections import Counter

import yaml

import epimer
from epimer.checkpoints.hub import REPO
from epimer.plan.jobs import Plan
from epimer.plan.participants import Participant
from epimer.records import MergeRecord

HUB_NAME = re.compile(rf"({REPO})@[0-9a-f]{{40}}")


def model_card(plan: Plan, record: MergeRecord) -> str:
    """Return README.md with the tags that the hub understands, and no local path."""
    adapter = plan.recipe is not None and plan.recipe.output == "lora"
    library, kind = ("peft", ["lora"]) if adapter else ("transformers", [])
    head: dict[str, object] = {"library_name": library, "tags": ["merge", "epimer", plan.method.name, *kind]}
    hub = [match[1] for name in _names(plan) if (match := HUB_NAME.fullmatch(name))]
    if hub:
        head |= {"base_model": list(dict.fromkeys(hub)), "base_model_relation": "merge"}
    title = plan.participants.donor.name.split("@")[0].split("/")[-1]
    participants = plan.participants
    count = "one model" if len(participants.models) == 1 else f"{len(participants.models)} models"
    models = "\n".join(f"- {_named(model)}" for model in participants.models)
    base = "" if participants.base is None else f"\nBase: {_named(participants.base)}\n"
    return f"""---
{yaml.safe_dump(head, sort_keys=False).strip()}
---

# {title}, {count} merged

Made with epimer {epimer.__version__} by **{plan.method.name}**: {plan.method.summary}.

    {plan.method.equation}
{base}
Models (the code is a fingerprint of the weights):

{models}

## Recipe

```yaml
{plan.public_recipe().strip()}
```

## How it went

{_findings(record)}

## Citation

{plan.method.citation}
"""


def _named(one: Participant) -> str:
    return f"{one.checkpoint.name} (`{one.checkpoint.fingerprint}`)"


def _names(plan: Plan) -> list[str]:
    return [part for one in plan.participants.all for part in one.checkpoint.name.split("+")]


def _findings(record: MergeRecord) -> str:
    """Say in a table what happened to the tensors."""
    rules = Counter(tensor.rule for tensor in record.tensors.values())
    lines = ["| | |", "|---|---|"]
    for rule, count in sorted(rules.items()):
        lines.append(f"| tensors by rule: {rule} | {count} ({100 * record.shares[rule]:.3g}% of the parameters) |")
    for status in ("damped", "stalled", "clamped", "tied"):
        if count := sum(tensor.status == status for tensor in record.tensors.values()):
            lines.append(f"| {status} | {count} |")
    if errors := [tensor.error for tensor in record.tensors.values() if tensor.error is not None]:
        lines.append(f"| largest share of a layer's change that the adapter's rank leaves out | {max(errors):.2g} |")
    gains = [tensor.eta for tensor in record.tensors.values() if tensor.eta is not None]
    if gains:
        lines.append(f"| η, what curvature gained over the flat mean, summed over layers | {sum(gains):.4g} |")
    lines.append(f"| largest relative residual | {max((t.residual for t in record.tensors.values()), default=0):.2g} |")
    return "\n".join(lines)
