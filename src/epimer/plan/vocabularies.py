"""Bring the embeddings and heads of models with different tokenizers to one vocabulary, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.sidecar_files import vocabularies, vocabulary
from epimer.checkpoints.tokenizer_files import with_tokens
from epimer.checkpoints.vocabulary import Aligned, Origin, token_tables
from epimer.errors import RecipeError, listed
from epimer.methods.rules import matching
from epimer.recipe.model import UNION, Recipe, TokenSource

MOST_SPARE_ROWS = 1 << 16  # of no token, more than the models' tables have: padding, or gaps between ids


@dataclass(frozen=True)
class Words:
    """The vocabulary of one model and its tables of embeddings and heads."""

    text: str
    """what the recipe calls the model"""
    checkpoint: Checkpoint
    tokens: Mapping[int, str]

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in self.tokens.items()}

    @cached_property
    def tables(self) -> list[str]:
        found = token_tables(self.checkpoint.headers, max(self.tokens) + 1) if self.tokens else []
        length = self.checkpoint.headers[found[0]].shape[0] if found else 0
        return [name for name in found if self.checkpoint.headers[name].shape[0] == length]

    @property
    def rows(self) -> int:
        return self.checkpoint.headers[self.tables[0]].shape[0] if self.tables else 0


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of the output, and the files of a tokenizer that knows them where none of the models' does."""

    tokens: Mapping[int, str] = field(default_factory=dict)
    """by id; empty where models are as they were"""
    files: Mapping[str, bytes] = field(default_factory=dict)


def align_vocabularies(
    recipe: Recipe, models: Mapping[str, Checkpoint], tokenizer: Path | None, notes: list[str]
) -> tuple[dict[str, Checkpoint], Vocabulary]:
    """Return the models, by what the recipe calls them, with rows that follow the output's tokenizer.

    The first of them is the base, or the first model. Where the recipe names no tokenizer, only tables that could not
    be merged otherwise are aligned: those of different lengths, or with tokens of different models in one row.

    Args:
        recipe: says which tokenizer, and where the rows of some tokens come from.
        models: all that have embeddings.
        tokenizer: the folder of the tokenizer that the recipe names, or of the first model's.
        notes: what was done is added.
    """
    unchanged = dict(models), Vocabulary()
    words = list(_words(models))
    asked = recipe.tokenizer_source is not None or recipe.tokenizer is not None
    if not all(one.tables for one in words):
        if recipe.tokenizer_source == UNION:
            lacking = next(one.text for one in words if not one.tables)
            raise RecipeError(
                f"tokenizer_source: union needs every model's tokenizer and table of embeddings, and {lacking} lacks "
                "one; save its tokenizer beside it, or name a tokenizer."
            )
        return unchanged
    kept = all(matching(name, recipe.rules) in ("copy", "skip") for name in words[0].tables)
    if not asked and (kept or not _must_be_aligned(words)):
        return unchanged
    union = recipe.tokenizer_source == UNION or not asked
    target = dict(_union(words)) if union else vocabulary(tokenizer) if tokenizer is not None else {}
    if not target:
        return unchanged
    rows = _rows(words, target, recipe.tokenizer.pad_to_multiple_of if recipe.tokenizer else None)
    sources = recipe.tokenizer.tokens if recipe.tokenizer else {}
    if unknown := sorted(sources.keys() - target.values()):
        raise RecipeError(f"tokenizer.tokens names {listed(unknown)}, which the output's tokenizer does not have.")
    special = {token: (_special(token, source, words), source.force) for token, source in sources.items()}
    base = words[0] if recipe.base_model is not None else None
    aligned: dict[str, Checkpoint] = {}
    for one in words:
        origins = [_origin(i, target.get(i), one, words, base, special) for i in range(rows)]
        same = rows == one.rows and all(o == ((one.checkpoint, i),) for i, o in enumerate(origins))
        aligned[one.text] = one.checkpoint if same else Aligned(one.checkpoint, one.tables, origins)
    if all(aligned[one.text] is one.checkpoint for one in words):
        return unchanged
    notes += _notes(words, target, aligned)
    return aligned, Vocabulary(target, _files(words, target) if union else {})


def _words(models: Mapping[str, Checkpoint]) -> Iterator[Words]:
    """Yield every model's vocabulary; a model without a tokenizer has the first one's."""
    folders = {text: checkpoint.tokenizer_folder for text, checkpoint in models.items()}
    read = vocabularies(dict.fromkeys(folder for folder in folders.values() if folder is not None))
    first: dict[int, str] = {}
    for text, checkpoint in models.items():
        folder = folders[text]
        found = {} if folder is None else read[folder]
        first = first or found
        yield Words(text, checkpoint, found or first)


def _must_be_aligned(words: Sequence[Words]) -> bool:
    """Whether models could not be merged row by row although none gives a token of the first another id."""
    base, *others = words
    if any(base.tokens.get(i, token) != token for one in others for i, token in one.tokens.items()):
        return False
    seen: dict[int, str] = {}
    clash = any(seen.setdefault(i, token) != token for one in others for i, token in one.tokens.items())
    return clash or len({one.rows for one in words}) > 1


def _union(words: Sequence[Words]) -> Iterator[tuple[int, str]]:
    """Yield the tokens of all models: the first's as it has them, then those that others add."""
    yield from words[0].tokens.items()
    known, following = {*words[0].ids}, max(words[0].tokens) + 1
    for one in words[1:]:
        for _, token in sorted(one.tokens.items()):
            if token not in known:
                known.add(token)
                yield following, token
                following += 1


def _rows(words: Sequence[Words], target: Mapping[int, str], multiple: int | None) -> int:
    """Return how long tables must be: as the base's, if its tokens keep their ids and there is room, or as needed.

    What has no token is bounded, so that a few words of a recipe or a tokenizer cannot ask for tables without end.
    """
    base = words[0]
    kept = all(target.get(i) == token for i, token in base.tokens.items())
    rows = max(max(target) + 1, base.rows if kept else 0)
    rows = rows if multiple is None else -(-rows // multiple) * multiple
    if rows > len(target) + max(one.rows for one in words) + MOST_SPARE_ROWS:
        raise RecipeError(
            f"the output's {len(target)} tokens would have tables of more than {MOST_SPARE_ROWS} rows to spare; take a "
            "smaller pad_to_multiple_of, or a tokenizer without such gaps between its ids."
        )
    return rows


def _origin(
    i: int,
    token: str | None,
    one: Words,
    words: Sequence[Words],
    base: Words | None,
    special: Mapping[str, tuple[Origin, bool]],
) -> Origin:
    """Return where a model's row of a token comes from: the model, or what stands for tokens that it lacks.

    That is the recipe's choice, the base's row, or the mean of those that have one.
    """
    if token is None:  # a row to spare
        return next((((w.checkpoint, i),) for w in (one, words[0]) if i < w.rows and i not in w.tokens), ())
    origin, force = special.get(token, (None, False))
    if token in one.ids and not force:
        return ((one.checkpoint, one.ids[token]),)
    if origin is not None:
        return origin
    if base is not None and token in base.ids:
        return ((base.checkpoint, base.ids[token]),)
    return tuple((other.checkpoint, other.ids[token]) for other in words if token in other.ids)


def _special(token: str, source: TokenSource, words: Sequence[Words]) -> Origin:
    """Return the row that a recipe chooses for a token."""
    if source.model is None:
        return ()
    owner = next((one for one in words if one.text == source.model), None)
    if owner is None:
        raise RecipeError(f"tokenizer.tokens: the source of {token!r} is {source.model}, which is not merged here.")
    wanted = token if source.token is None else source.token
    number = owner.ids.get(wanted) if source.token_id is None else source.token_id
    if number is None or number >= owner.rows:
        named = wanted if source.token_id is None else source.token_id
        raise RecipeError(f"tokenizer.tokens: {source.model} has no token {named!r}, the source of {token!r}.")
    return ((owner.checkpoint, number),)


def _files(words: Sequence[Words], target: Mapping[int, str]) -> dict[str, bytes]:
    """Return the files of a tokenizer with all tokens, made of the first model's; none where that has them all."""
    base, owners = words[0], dict[str, Path]()
    for one in words[1:]:
        if (folder := one.checkpoint.tokenizer_folder) is not None:
            owners |= {token: folder for token in one.ids if token not in base.ids and token not in owners}
    folder = base.checkpoint.tokenizer_folder
    return with_tokens(folder, target, owners) if owners and folder is not None else {}


def _notes(words: Sequence[Words], target: Mapping[int, str], aligned: Mapping[str, Checkpoint]) -> Iterator[str]:
    moved = [one.text for one in words if aligned[one.text] is not one.checkpoint]
    added = [token for token in target.values() if token not in words[0].ids]
    more = f"; {len(added)} tokens are added to {words[0].text}'s: {listed(added)}" if added else ""
    yield f"rows of embeddings are aligned by token in {listed(moved)}{more}."
    kept = {*target.values()}
    for one in words:
        if lost := [token for token in one.tokens.values() if token not in kept]:
            yield f"{len(lost)} tokens of {one.text} are not in the output's tokenizer: {listed(lost)}."
