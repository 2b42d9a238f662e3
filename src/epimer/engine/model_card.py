"""The model card: what was merged, how, by which method, and how it went."""

from __future__ import annotations

import re
from collections import Counter

import yaml

import epimer
from epimer.checkpoints.folder import DIFFUSERS
from epimer.checkpoints.hub import HUB_NAME
from epimer.plain_text import code_span, visible
from epimer.plan.cards import agreed_card
from epimer.plan.jobs import Plan
from epimer.plan.participants import Participant
from epimer.records import MergeRecord


def model_card(plan: Plan, record: MergeRecord) -> str:
    """Return README.md with the tags that the hub understands, and no local path."""
    agreed, _ = agreed_card(plan.participants)
    library = _library(plan, agreed.pop("library_name", "transformers"))
    kind = ["lora"] if library == "peft" else []
    tags = ["merge", "epimer", plan.method.name, *kind]
    head: dict[str, object] = {**agreed, "library_name": library, "tags": tags}
    hub = [match[1] for name in _names(plan) if (match := HUB_NAME.fullmatch(name))]
    if hub:
        head |= {"base_model": list(dict.fromkeys(hub)), "base_model_relation": "merge"}
    title = code_span(plan.participants.donor.name.split("@")[0].split("/")[-1])
    recipe = visible(plan.public_recipe().strip())
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", recipe)), default=0))
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

{fence}yaml
{recipe}
{fence}

## How it went

{_findings(record)}

## Citation

{plan.method.citation}
"""


def _named(one: Participant) -> str:
    return f"{code_span(one.checkpoint.name)} (`{one.checkpoint.fingerprint}`)"


def _library(plan: Plan, named: str) -> str:
    """Return the library that loads the output; `named` is what the inputs' cards say."""
    if plan.recipe is not None and plan.recipe.output == "lora":
        return "peft"
    if plan.modules is not None:
        return "sentence-transformers"
    diffusers = any(path.name.startswith(DIFFUSERS) for path in plan.participants.donor.files)
    return "diffusers" if diffusers else named


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
