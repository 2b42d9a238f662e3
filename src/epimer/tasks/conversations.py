"""Rows of prompts with answers, of instructions and of chats, as tokens of which those of the answers count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from epimer.errors import DataError, first_line, listed, short
from epimer.tasks.chat_templates import render_template
from epimer.tasks.tables import Table

TEXTS = ("text", "sentence", "content", "input", "review", "document", "prompt")
CHATS = ("messages", "conversations", "conversation")
PROMPT, COMPLETIONS = "prompt", ("response", "completion")
INSTRUCTION, INPUTS, OUTPUTS = "instruction", ("input", "context"), ("output", *COMPLETIONS)
UNCLEAR = (*OUTPUTS, "answer", "chosen", "rejected")  # beside a lone prompt these say that it is not all there is

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant"}
MARK = "\ue000answer\ue001"  # stands for a message's content to find its place; private characters, in no text
ALPACA = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
)
PAIRED = ", paired with an input that provides further context"

Message = dict[str, Any]
Tokens = tuple[list[int], list[bool]]
"""a row's tokens, and for each whether it belongs to an answer"""


class Chat(NamedTuple):
    """A row's messages, and the first of them whose answer counts."""

    messages: list[Message]
    first: int = 0
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Layout:
    """How rows hold texts: `kind` is text, pair (a prompt and its answer), instruction or chat."""

    kind: str
    columns: tuple[str, ...]

    def description(self, name: str, *, template: bool) -> str:
        """Return one line on what is read from the table `name`, and what the loss is of."""
        columns = listed(self.columns)
        if self.kind == "pair":
            return f"{name}: {columns} are joined as they are; the loss is that of {self.columns[-1]!r}."
        if self.kind == "chat":
            turns = "" if len(self.columns) == 1 else f" in {self.columns[-1]!r}"
            return (
                f"{name}: chats in {columns}, in the chat template; the loss is that of the assistant's turns{turns}."
            )
        form = "the chat template" if template else "Alpaca's form, as the tokenizer has no chat template"
        return f"{name}: instructions in {columns}, in {form}; the loss is that of {self.columns[-1]!r}."


def find_layout(table: Table, text: str | None, row: int = 0) -> Layout | None:
    """Return how a table holds texts for a language model, by its columns and one of its rows; None where it does not.

    `text` names the column, or several with commas, the answer's last. What can be read in two ways is refused.
    """
    if text is not None and "," in text and text not in table.columns:
        columns = [str(table.column(name.strip(), (), "text")) for name in text.split(",")]
        if len(columns) > 2 and columns[0] != INSTRUCTION:
            expected = "a prompt and its answer, or an instruction, its input and its output"
            raise DataError(f"{table.name}: --text {text} names {len(columns)} columns, expected {expected}.")
        return _layout(table, tuple(columns), row)
    if text is not None:
        return _layout(table, (str(table.column(text, (), "text")),), row)
    candidates: list[tuple[str, ...]] = [(name,) for name in CHATS if name in table.columns]
    answers = [name for name in OUTPUTS if name in table.columns]
    if PROMPT in table.columns:
        candidates += [(PROMPT, name) for name in answers if name in COMPLETIONS]
    if INSTRUCTION in table.columns:
        context = [name for name in INPUTS if name in table.columns][:1]
        candidates += [(INSTRUCTION, *context, name) for name in answers]
    plain = [name for name in TEXTS if name in table.columns and not (candidates and name in (PROMPT, *INPUTS))][:1]
    unclear = [name for name in UNCLEAR if plain and plain[0] in (PROMPT, *INPUTS) and name in table.columns]
    candidates += [tuple(plain)] if plain else []
    if len(candidates) > 1 or unclear:
        ways = [",".join(columns) for columns in candidates] + [f"{plain[0]},{name}" for name in unclear]
        problem = f"{table.name} can be read in {len(ways)} ways: it has {listed(table.columns, 12)}"
        raise DataError(f"{problem}; choose with --text {' or --text '.join(ways)} (the last is the answer).")
    return _layout(table, candidates[0], row) if candidates else None


def _layout(table: Table, columns: tuple[str, ...], row: int) -> Layout:
    """Return the layout of these columns; lists are chats."""
    lists = [isinstance(table.row(row).get(name), list) for name in columns]
    if all(lists) or columns[0] in CHATS:
        return Layout("chat", columns)
    if len(columns) == 1:
        return Layout("text", columns)
    if any(lists):
        problem = f"has a list of messages in one of {listed(columns)} and a text in another"
        raise DataError(f"{table.where(row)} {problem}; give texts, or lists, in both.")
    return Layout("instruction" if columns[0] == INSTRUCTION else "pair", columns)


def has_template(reader: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return getattr(reader, "chat_template", None) is not None


def answer_tokens(reader: Any, table: Table, rows: Sequence[int], layout: Layout, longest: int) -> list[Tokens]:
    """Return the tokens of rows with answers, at most `longest` of each, and which of them belong to answers."""
    if layout.kind == "chat" or (layout.kind == "instruction" and has_template(reader)):
        read = read_chat if layout.kind == "chat" else _instruction_chat
        return [_chat_tokens(reader, read(table, i, layout.columns), table.where(i), longest) for i in rows]
    if layout.kind == "pair":
        prompts, answers = ([table.text(i, name) for i in rows] for name in layout.columns)
    else:
        prompts = [_alpaca(table, i, layout.columns) for i in rows]
        answers = [table.text(i, layout.columns[-1]) + (reader.eos_token or "") for i in rows]
    encoded = reader(prompts, truncation=True, max_length=longest, add_special_tokens=True)["input_ids"]
    tokens: list[Tokens] = []
    for i, prompt, answer in zip(rows, encoded, reader(answers, add_special_tokens=False)["input_ids"], strict=True):
        if len(prompt) >= longest:
            problem = f"has a prompt of {longest} tokens or more, which leaves none for its response"
            raise DataError(f"{table.where(i)} {problem}; raise --max-length, or leave the row out.")
        counted = [False] * len(prompt) + [True] * len(answer)
        tokens.append(((prompt + answer)[:longest], counted[:longest]))
    return tokens


# --- rows ------------------------------------------------------------------------------------------------------------


def _context(table: Table, i: int, columns: Sequence[str]) -> str:
    """Return an instruction's input, which may be missing or empty."""
    if len(columns) < 3 or table.row(i).get(columns[1]) in (None, ""):
        return ""
    return table.text(i, columns[1])


def _alpaca(table: Table, i: int, columns: Sequence[str]) -> str:
    """Return an instruction as Alpaca's prompt."""
    context = _context(table, i, columns)
    start = ALPACA.format(paired=PAIRED if context else "", instruction=table.text(i, columns[0]))
    return start + (f"### Input:\n{context}\n\n" if context else "") + "### Response:\n"


def _instruction_chat(table: Table, i: int, columns: Sequence[str]) -> Chat:
    """Return an instruction, with its input, as the user's turn and its output as the assistant's."""
    parts = [part for part in (table.text(i, columns[0]), _context(table, i, columns)) if part]
    turns = (("user", "\n\n".join(parts)), ("assistant", table.text(i, columns[-1])))
    return Chat([{"role": role, "content": content} for role, content in turns])


def read_chat(table: Table, i: int, columns: Sequence[str], *, parts_allowed: bool = False) -> Chat:
    """Return the messages of a row, and whose answers count: all, or those of the last of several columns.

    A message's content may be a list of parts (texts and images) where they are allowed.
    """
    row, where = table.row(i), table.where(i)
    contents = (str, list) if parts_allowed else (str,)
    parts = [_messages(row.get(name), name, where, contents) for name in columns]
    tools = row.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where} has {short(tools)} in 'tools', expected a list of functions.")
    chat = Chat([message for part in parts for message in part], sum(map(len, parts[:-1])), tools)
    if not any(map(_counts, chat.messages[chat.first :])):
        raise DataError(f"{where} has no turn of the assistant in {columns[-1]!r}; leave it out.")
    return chat


def _messages(value: Any, column: str, where: str, contents: tuple[type, ...]) -> list[Message]:
    """Return messages as {role, content}; also from {from, value} with the roles human and gpt."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} has {short(value)} in {column!r}, expected a list of messages.")
    messages = []
    for message in value:
        known = {} if not isinstance(message, dict) else {k: v for k, v in message.items() if v is not None}
        if "from" in known and "value" in known:
            role, known["content"] = known.pop("from"), known.pop("value")
            known["role"] = SHAREGPT.get(role, role)
        if known.get("role") not in ROLES:
            expected = f"expected role (one of {', '.join(ROLES)}) and content, or from (human, gpt) and value"
            raise DataError(f"{where} has the message {short(message)} in {column!r}, {expected}.")
        if not isinstance(known.setdefault("content", "" if "tool_calls" in known else None), contents):
            raise DataError(f"{where} has the content {short(known['content'])} in {column!r}, expected a text.")
        messages.append(known)
    return messages


def _counts(message: Message) -> bool:
    """Whether the loss counts a message: the assistant's, unless its `weight` is 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


# --- chats as tokens -------------------------------------------------------------------------------------------------


def _chat_tokens(reader: Any, chat: Chat, where: str, longest: int) -> Tokens:
    """Return a chat in the tokenizer's chat template as tokens, and which of them are the assistant's."""
    tokens, counted = text_tokens(reader, *render_chat(reader, chat, where))
    if not any(counted[:longest]):
        problem = f"has no answer within its first {longest} tokens"
        raise DataError(f"{where} {problem}; raise --max-length, or leave the row out.")
    return tokens[:longest], counted[:longest]


def render_chat(reader: Any, chat: Chat, where: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat in the tokenizer's chat template, and where in it the assistant's turns begin and end."""
    if not has_template(reader):
        remedy = "copy chat_template.jinja into the model's folder, or write the chats as texts"
        raise DataError(f"{where} is a chat, but the tokenizer has no chat template; {remedy}.")
    if not reader.is_fast:
        raise DataError(f"{where} is a chat, for which the tokenizer must be a fast one; add its tokenizer.json.")
    render = partial(_render, reader, chat.tools, where)
    full = render(chat.messages)
    spans = []
    for k, message in enumerate(chat.messages):
        if k >= chat.first and _counts(message):
            span = _after_prompt(full, chat.messages, k, render) or _by_mark(full, chat.messages, k, render)
            if span is None:
                problem = f"has message {k}, whose text the chat template changes, so that it is not found in the chat"
                raise DataError(f"{where} {problem}; leave the row out, or write the chats as texts.")
            spans.append(span)
    return full, spans


def text_tokens(reader: Any, text: str, spans: Sequence[tuple[int, int]], *, special: bool = False) -> Tokens:
    """Return a text's tokens, and which of them lie in one of the spans; `special` adds the tokenizer's own ends."""
    encoded = reader(text, add_special_tokens=special, return_offsets_mapping=True)
    counted = [any(max(a, start) < min(b, end) for start, end in spans) for a, b in encoded["offset_mapping"]]
    return encoded["input_ids"], counted


def plain_text(message: Message) -> str:
    """Return the text of a message, whose content is one, or a list of parts."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _render(reader: Any, tools: Any, where: str, messages: Sequence[Message], *, prompt: bool = False) -> str:
    """Return messages in the chat template."""
    try:
        return render_template(reader, messages, tools, prompt=prompt)
    except ValueError as error:  # a TemplateError, or transformers finds no template for these tools
        problem = f"{where} does not fit the chat template: {first_line(error)}"
        raise DataError(f"{problem}; leave the row out.") from error


def _after_prompt(full: str, messages: Sequence[Message], k: int, render: Any) -> tuple[int, int] | None:
    """Return where message k lies: from the end of the prompt for it to its own end, which the model must write."""
    try:
        before = render(messages[:k], prompt=True) if k else MARK
        alone = full if k == len(messages) - 1 else render(messages[: k + 1])
    except DataError:  # a template may refuse half a chat
        return None
    content = plain_text(messages[k])
    written = alone.rfind(content) + len(content) if content in alone else 0
    end = max(len(alone.rstrip()), written)  # white space after the end is not written
    fits = full.startswith(before) and alone.startswith(before) and full[:end] == alone[:end] and end > len(before)
    return (len(before), end) if fits else None


def _by_mark(full: str, messages: Sequence[Message], k: int, render: Any) -> tuple[int, int] | None:
    """Return where the content of message k lies, with what ends its turn: where a mark is if it says that instead."""
    mark = MARK if isinstance(messages[k]["content"], str) else [{"type": "text", "text": MARK}]
    marked = [*messages[:k], {**messages[k], "content": mark}, *messages[k + 1 :]]
    try:
        before, _, after = render(marked).partition(MARK)
        ending = render(marked[: k + 1]).partition(MARK)[2].rstrip()
    except DataError:
        return None
    text = plain_text(messages[k])
    for content in (text, text.strip()):
        if content and full == before + content + after:
            return len(before), len(before + content) + (len(ending) if after.startswith(ending) else 0)
    return None
