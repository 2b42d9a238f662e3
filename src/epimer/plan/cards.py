"""What the model cards of the inputs agree on, for the card of the output."""

from __future__ import annotations

from pathlib import Path

from epimer.checkpoints.cards import card_head
from epimer.checkpoints.checkpoint import Checkpoint
from epimer.plan.participants import Participants

LICENSE = ("license", "license_name", "license_link")


def agreed_card(participants: Participants) -> tuple[dict[str, str], list[str]]:
    """Return what the output's card takes over from the inputs' cards, and a note where it can name no license.

    A license is taken over where every input names the same; the pipeline tag and the library where all that name one
    do.
    """
    heads = [(one.label, card_head(folder)) for one in participants.all for folder in card_folders(one.checkpoint)]
    card: dict[str, str] = {}
    for key in ("pipeline_tag", "library_name"):
        if len(values := {head[key] for _, head in heads if key in head}) == 1:
            card[key] = values.pop()
    licenses = [(label, _license(head)) for label, head in heads]
    stated = {name for _, name in licenses if name}
    if len(stated) == 1 and all(name for _, name in licenses):
        links = {head.get("license_link", "") for _, head in heads}
        terms = {key: value for key, value in heads[0][1].items() if key in LICENSE}
        card |= {key: value for key, value in terms.items() if key != "license_link" or len(links) == 1}
    elif stated:
        listing = ", ".join(f"{label} {name or 'none'}" for label, name in dict.fromkeys(licenses))
        reason = f"the model card names no license, as the inputs do not agree: {listing}"
        return card, [f"{reason}; write it there yourself."]
    return card, []


def card_folders(checkpoint: Checkpoint) -> list[Path]:
    """Return the folders whose cards speak of a checkpoint: those of its models and of its adapters."""
    beside = dict.fromkeys(file.parent for file in checkpoint.files)
    adapters = [folder for folder in beside if (folder / "adapter_config.json").is_file()]
    return list(dict.fromkeys([*checkpoint.folders, *adapters]))


def _license(head: dict[str, str]) -> str:
    """Return the name of a card's license; licenses that the hub does not know have one of their own."""
    name = head.get("license", "")
    return f"other ({head.get('license_name', '?')})" if name == "other" else name
