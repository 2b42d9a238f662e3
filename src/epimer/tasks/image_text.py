"""Batches for vision-language models: images with a prompt and its answer, or chats with images, by their processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from epimer.errors import DataError, EpimerWarning, listed, short, warn
from epimer.tasks.batches import IGNORED
from epimer.tasks.conversations import Chat, find_layout, has_template, read_chat, render_chat, text_tokens
from epimer.tasks.generation import Sample
from epimer.tasks.tables import Table, decode_image

if TYPE_CHECKING:
    from epimer.tasks.task import Task

IMAGES = ("image", "images", "img")
MARK = "<image>"  # in texts, as LLaVA's data has it
REMEDY = "leave the row out"


class ImagesAndTexts:
    """Rows of images with a text, a prompt and its answer, an instruction or a chat; the loss is of the answers."""

    def __init__(self, task: Task, table: Table, text: str | None, image: str | None, longest: int, row: int) -> None:
        self.task, self.table, self.longest = task, table, longest
        self.processor, self.tokenizer = task.reader, task.tokenizer
        if not has_template(self.tokenizer):
            remedy = "copy chat_template.jinja into its folder"
            raise DataError(f"{task.checkpoint.where} has no chat template, which says where images stand; {remedy}.")
        layout, self.image = find_layout(table, text, row), table.column(image, IMAGES, "image")
        if layout is None:
            raise DataError(f"{table.name} has no texts; it has {listed(table.columns, 12)}: name them with --text.")
        self.layout = layout
        if layout.kind != "chat" and self.image is None:
            missing = " or ".join(map(repr, IMAGES))
            known = listed(table.columns, 12)
            raise DataError(f"{table.name} has no column {missing}; it has {known}: name the images' with --image.")
        images = "" if self.image is None else f"images in {self.image!r}, "
        what = f"{table.name}: {images}texts in {listed(layout.columns)}, in the chat template"
        warn(EpimerWarning(f"{what}; the loss is that of the assistant's turns."))

    def sample(self, i: int) -> Sample:
        """Return a row as tokens, of which the processor makes as many for an image as the model has, and pixels."""
        where = self.table.where(i)
        chat, images = self._chat(i)
        text, spans = render_chat(self.tokenizer, chat, where)
        bos = self.tokenizer.bos_token
        special = not (bos and text.startswith(bos))  # as the processor's own apply_chat_template has it
        plain, counted = text_tokens(self.tokenizer, text, spans, special=special)
        options: dict[str, Any] = {"images": images} if images else {}
        try:
            found = self.processor(text=[text], return_tensors="pt", add_special_tokens=special, **options)
        except (ValueError, TypeError, IndexError, KeyError) as error:
            raise DataError(f"{where}: the processor failed: {short(str(error))}; {REMEDY}.") from error
        ids: list[int] = found["input_ids"][0].tolist()
        self.task.check_tokens(self.table, i, ids, fewest=2)
        answers = plain[counted.index(True) :] if any(counted) else []
        start = len(ids) - len(answers)
        if not answers or ids[start:] != answers:  # only images become more tokens, so the rest ends both alike
            problem = "has an image after an answer, so that it cannot be told which tokens are the answer's"
            raise DataError(f"{where} {problem}; {REMEDY}.")
        if len(ids) > self.longest:
            problem = f"has {len(ids)} tokens, images included, but at most {self.longest} are taken"
            raise DataError(f"{where} {problem}; raise --max-length, or {REMEDY}.")
        mask = [False] * start + counted[len(counted) - len(answers) :]
        targets = [token if counts else IGNORED for token, counts in zip(ids, mask, strict=True)]
        dtype = next(self.task.model.parameters()).dtype
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
        return Sample(inputs, torch.tensor([[*targets[1:], IGNORED]]))

    def _chat(self, i: int) -> tuple[Chat, list[Any]]:
        """Return a row as messages whose contents are lists of parts, and its images in their order."""
        table, columns, where = self.table, self.layout.columns, self.table.where(i)
        given = [] if self.image is None else table.row(i).get(self.image)
        given = given if isinstance(given, list) else [given]
        if self.layout.kind == "chat":
            chat = read_chat(table, i, columns, parts_allowed=True)
        else:
            prompt = [table.text(i, name) for name in columns[:-1] if table.row(i).get(name) not in (None, "")]
            turns = (("user", "\n\n".join(prompt)), ("assistant", table.text(i, columns[-1])))
            chat = Chat([{"role": role, "content": content} for role, content in turns])
        messages = [{**message, "content": self._parts(message["content"], where)} for message in chat.messages]
        parts = [part for message in messages for part in message["content"] if part["type"] == "image"]
        inside = [part["image"] for part in parts if "image" in part]
        if inside and (given or len(inside) < len(parts)):
            problem = "names images in its messages and beside them"
            raise DataError(f"{where} {problem}; name all of them in one place.")
        if given and not parts:  # they stand before the first prompt
            first = next((message for message in messages if message["role"] == "user"), None)
            if first is None:
                raise DataError(f"{where} has no turn of the user for its images to stand in; {REMEDY}.")
            parts = [{"type": "image"} for _ in given]
            first["content"] = [*parts, *first["content"]]
        images = inside or given
        if len(parts) != len(images):
            raise DataError(f"{where} has {len(images)} images, but its texts have {len(parts)} places for them.")
        column = self.image or columns[0]
        for message in messages:
            message["content"] = [{k: v for k, v in part.items() if k != "image"} for part in message["content"]]
        decoded = [decode_image(table.source(i, value, column, "image"), where) for value in images]
        return chat._replace(messages=messages), decoded

    def _parts(self, content: Any, where: str) -> list[dict[str, Any]]:
        """Return a message's content as parts, {type: text, text} and {type: image}, with `image` where it is named."""
        if isinstance(content, str):
            pieces = content.split(MARK)
            parts = [{"type": "text", "text": pieces[0]}]
            for piece in pieces[1:]:
                parts += [{"type": "image"}, {"type": "text", "text": piece}]
            return [part for part in parts if part.get("text") != ""]
        parts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            elif kind == "image":
                named = next((part[key] for key in ("image", "path", "bytes") if part.get(key) is not None), None)
                parts.append({"type": "image"} if named is None else {"type": "image", "image": named})
            else:
                expected = "expected {type: text, text} or {type: image}, the image in `image` or `path`"
                raise DataError(f"{where} has the part {short(part)} in a message, {expected}.")
        return parts
