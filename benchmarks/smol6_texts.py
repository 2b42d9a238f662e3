"""smol6's texts as tokens, in batches for training and judging, and whether a generated response is right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from epimer.tasks.task import next_tokens

END = "<|im_end|>"
NEW_TOKENS = 160  # most tokens of a generated response


@dataclass(frozen=True)
class Texts:
    """Prompts with their responses as tokens, padded on the right."""

    ids: Tensor
    """[texts, tokens]"""
    prompts: Tensor
    """tokens of each prompt; on the CPU, as is `lengths`"""
    lengths: Tensor
    """tokens of prompt and response"""

    def __len__(self) -> int:
        return len(self.ids)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield inputs and next tokens, which are -100 where they are not the response's."""
        order = torch.arange(len(self)) if order is None else order.cpu()
        for indices in torch.split(order, size):
            if not len(indices):
                continue
            longest = int(self.lengths[indices].max())
            place = torch.arange(longest)
            real = place < self.lengths[indices, None]
            response = real & (place >= self.prompts[indices, None])
            ids = self.ids[indices.to(self.ids.device), :longest]
            inputs = {"input_ids": ids, "attention_mask": real.long().to(ids.device)}
            yield inputs, next_tokens(ids, response.to(ids.device))

    def left_padded_prompts(self, pad: int) -> dict[str, Tensor]:
        """Return the prompts alone, padded on the left."""
        longest = int(self.prompts.max())
        ids = torch.full((len(self), longest), pad)
        mask = torch.zeros_like(ids)
        for row, (tokens, count) in enumerate(zip(self.ids.cpu(), self.prompts.tolist(), strict=True)):
            ids[row, longest - count :], mask[row, longest - count :] = tokens[:count], 1
        return {"input_ids": ids.to(self.ids.device), "attention_mask": mask.to(self.ids.device)}

    def responses(self) -> list[list[int]]:
        """Return the tokens of every response but its last, the end."""
        rows = zip(self.ids.tolist(), self.prompts.tolist(), self.lengths.tolist(), strict=True)
        return [tokens[start : stop - 1] for tokens, start, stop in rows]


def read_texts(path: Path, tokenizer: Tokenizer, device: str, limit: int | None) -> Texts:
    """Read a split; its texts are ordered by length, so that batches of neighbours need little padding."""
    with path.open() as file:
        examples = [json.loads(line) for line in file][:limit]
    heads = [f"<|im_start|>user\n{example['prompt']}{END}\n<|im_start|>assistant\n" for example in examples]
    tails = [f"{example['response']}{END}" for example in examples]
    encoded = [
        [encoding.ids for encoding in tokenizer.encode_batch(part, add_special_tokens=False)] for part in (heads, tails)
    ]
    pairs = sorted(zip(*encoded, strict=True), key=lambda pair: len(pair[0]) + len(pair[1]))
    lengths = torch.tensor([len(head) + len(tail) for head, tail in pairs])
    ids = torch.zeros(len(pairs), int(lengths.max()), dtype=torch.long)
    for row, (head, tail) in enumerate(pairs):
        ids[row, : lengths[row]] = torch.tensor([*head, *tail])
    return Texts(ids.to(device), torch.tensor([len(head) for head, _ in pairs]), lengths)


def final_number(response: str) -> float | None:
    """Return the number after the last ####, or None."""
    numbers = re.findall(r"####\s*\$?(-?[\d,]*\.?\d+)", response)
    return float(numbers[-1].replace(",", "")) if numbers else None


def same_number(response: str, reference: str) -> bool:
    """Whether both end in the same number."""
    return final_number(response) is not None and final_number(response) == final_number(reference)


def same_words(response: str, reference: str) -> bool:
    """Whether both are equal up to white space."""
    return response.split() == reference.split()


def same_json(response: str, reference: str) -> bool:
    """Whether both are JSON and the same object."""
    try:
        return bool(json.loads(response) == json.loads(reference))
    except ValueError:
        return False


MATCH: dict[str, Callable[[str, str], bool]] = {
    "maths": same_number,
    "sql": same_words,
    "intent": same_json,
    "bash": same_words,
}


@torch.no_grad()
def exact_matches(network: Any, task: str, texts: Texts, tokenizer: Tokenizer) -> list[float]:
    """Return 1 for each text whose greedy response is right, else 0."""
    end = tokenizer.token_to_id(END)
    prompts = texts.left_padded_prompts(end)
    generated = network.generate(
        **prompts, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=end
    )
    new = generated[:, prompts["input_ids"].shape[1] :].tolist()
    responses = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in new]
    decoded = (tokenizer.decode_batch(rows, skip_special_tokens=False) for rows in (responses, texts.responses()))
    return [float(MATCH[task](*pair)) for pair in zip(*decoded, strict=True)]
