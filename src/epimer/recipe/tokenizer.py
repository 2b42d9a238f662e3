"""Read what a recipe says about the tokenizer: its source, the rows of single tokens, the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from epimer.recipe.chat_templates import TEMPLATES
from epimer.recipe.model import AUTO, UNION, TokenizerOptions, TokenSource
from epimer.recipe.yaml_lines import Location, spell

if TYPE_CHECKING:
    from epimer.recipe.load import Reader


def read_tokenizer(reader: Reader, data: Mapping[str, Any]) -> tuple[str | None, TokenizerOptions | None]:
    """Return the source of the tokenizer, from `tokenizer_source` or `tokenizer`, and what the latter says besides."""
    source = reader.text(("tokenizer_source",), data.get("tokenizer_source"))
    if "tokenizer" not in data:
        return source, None
    if source is not None:
        raise reader.error(
            ("tokenizer",), "'tokenizer' and 'tokenizer_source' both name a tokenizer; keep one of them."
        )
    path = ("tokenizer",)
    raw = reader.mapping(path, data["tokenizer"], ("source", "tokens", "pad_to_multiple_of"), {})
    multiple = raw.get("pad_to_multiple_of")
    if multiple is not None and (not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1):
        raise reader.wrong((*path, "pad_to_multiple_of"), multiple, "an integer at least 1")
    where = (*path, "tokens")
    tokens = raw.get("tokens") or {}
    if not isinstance(tokens, dict):
        raise reader.wrong(where, tokens, "a mapping of tokens to where their rows come from")
    sources = {str(token): _token(reader, (*where, token), one) for token, one in tokens.items()}
    source = reader.text((*path, "source"), raw.get("source"))
    return source or UNION, TokenizerOptions(tokens=sources, pad_to_multiple_of=multiple)


def _token(reader: Reader, path: Location, raw: Any) -> TokenSource:
    data = reader.mapping(path, raw, ("source", "force"), {})
    source, force, where = data.get("source"), data.get("force", False), (*path, "source")
    if not isinstance(force, bool):
        raise reader.wrong((*path, "force"), force, "true or false")
    if not isinstance(source, dict):
        text = reader.text(where, source)
        if text is None:
            raise reader.error(path, f"{spell(path)} has no 'source': a model, or {{kind: zero}}.")
        return TokenSource(model=text, force=force)
    if source.get("kind") == "zero":
        return TokenSource(force=force)
    if source.get("kind") != "model_token":
        raise reader.wrong((*where, "kind"), source.get("kind"), "zero or model_token")
    reader.mapping(where, source, ("kind", "model", "token", "token_id"), {})
    model, number = reader.text((*where, "model"), source.get("model")), source.get("token_id")
    token = reader.text((*where, "token"), source.get("token"))
    if model is None or (token is None) == (number is None):
        raise reader.error(where, f"{spell(where)} needs a 'model' and either 'token' or 'token_id'.")
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
        raise reader.wrong((*where, "token_id"), number, "an integer at least 0")
    return TokenSource(model=model, token=token, token_id=number, force=force)


def read_chat_template(reader: Reader, data: Mapping[str, Any]) -> str | None:
    """Return the chat template: its text, or auto; all of mergekit's names are known."""
    template = reader.text(("chat_template",), data.get("chat_template"))
    if template is None or template == AUTO or "{" in template:
        return template
    if template not in TEMPLATES:
        known = f"auto, {', '.join(TEMPLATES)}, or the text of a Jinja template: paste that of a model's"
        raise reader.wrong(("chat_template",), template, f"{known} chat_template.jinja or tokenizer_config.json")
    return TEMPLATES[template]
