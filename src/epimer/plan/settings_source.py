"""Which folder gives the output its tokenizer and generation settings: the base's, or what all models agree on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from epimer.checkpoints.sidecar_files import TOKEN_IDS, chat_settings, generation_settings
from epimer.checkpoints.tokenizer_files import with_chat_template
from epimer.errors import listed
from epimer.plan.participants import Participants
from epimer.recipe.model import AUTO


def settings_source(
    participants: Participants, named: str | None, tokenizer: Path | None, notes: list[str]
) -> tuple[Path | None, Path | None]:
    """Return the folders that give the tokenizer with its chat template, and the settings for generating.

    Both follow `named`, the recipe's tokenizer_source, whose folder is `tokenizer`. Where it names none they are the
    models', if all that have any agree, or else the base's; whichever was not the only choice is noted.
    """
    donor = participants.donor.folder
    if named is not None:
        return tokenizer, tokenizer if generation_settings(tokenizer) else donor
    chat = [(one.label, one.checkpoint.tokenizer_folder) for one in participants.models]
    generation = [(one.label, one.checkpoint.folder) for one in participants.models]
    return (
        _agreed(tokenizer, chat, chat_settings, "the tokenizer", notes),
        _agreed(donor, generation, generation_settings, "the generation settings", notes),
    )


def chat_template_files(
    template: str | None, participants: Participants, tokenizer: Path | None, files: Mapping[str, bytes]
) -> Mapping[str, bytes]:
    """Return the tokenizer's new files with the recipe's chat template; `auto` is that of most models."""
    if template == AUTO:
        folders = [one.checkpoint.tokenizer_folder for one in participants.models]
        templates = Counter(str(value) for one in folders if (value := chat_settings(one).get("chat template")))
        template = templates.most_common(1)[0][0] if templates else None
    return files if template is None else with_chat_template(tokenizer, files, template)


def _agreed(
    base: Path | None,
    models: list[tuple[str, Path | None]],
    settings: Callable[[Path | None], dict[str, Any]],
    what: str,
    notes: list[str],
) -> Path | None:
    """Return the folder of the first model where all models that have settings agree, else the base's.

    Models that end their texts by the same token, which is not the base's, may sample differently: they agree.
    """
    own = settings(base)
    having = [(label, folder, values) for label, folder in models if (values := settings(folder))]
    differing = [values for _, _, values in having if values != own]
    if not differing:
        return base
    keys = sorted({key for values in differing for key in own.keys() | values if own.get(key) != values.get(key)})
    disputed = [key for key in keys if any(values.get(key) != differing[0].get(key) for values in differing)]
    ids_agree = not {*TOKEN_IDS}.isdisjoint(keys) and {*TOKEN_IDS}.isdisjoint(disputed)
    if len(differing) == len(having) and (ids_agree or not disputed):
        label, folder, _ = having[0]
        apart = f" on all but {listed(disputed)}" if disputed else ""
        notes.append(
            f"{what} ({listed(keys)}) {_is(what)} not the base's but {label}'s, as all models agree{apart}; "
            "write tokenizer_source: base for the base's."
        )
        return folder
    notes.append(
        f"the models do not agree on {what} ({listed(keys)}): the base's {_is(what)} written; "
        "name a model as tokenizer_source for its."
    )
    return base


def _is(what: str) -> str:
    return "are" if what.endswith("s") else "is"
