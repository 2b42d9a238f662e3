"""Prompts, instructions and chats are read as people mean them: the model's own template, loss on answers alone."""

from __future__ import annotations

import json
import re
import resource
import warnings
from pathlib import Path

import pytest
import torch

from commands import run
from epimer.curvature.curvature import Curvature
from epimer.errors import CheckpointError, DataError, EpimerWarning
from epimer.tasks.data import open_data
from epimer.tasks.task import load_task

transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
IDS = {token: i for i, token in enumerate([*BYTES, *SPECIAL])}

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
THOUGHT = (  # of Qwen3's kind: an empty thought in the last turn only
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORCED = (  # of R1's kind: the prompt opens a thought that turns do not have
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'U:' + m['content'] }}"
    "{% else %}{{ 'A:' + m['content'].split('</think>')[-1] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:<think>\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return a tiny Llama whose tokens are bytes and five special tokens."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.LlamaConfig(**sizes, vocab_size=len(IDS), num_key_value_heads=1, max_position_embeddings=2048)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def task_with(model: Path, template: str | None):
    tokenizer = Tokenizer(models.BPE(IDS, [], fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIAL[:2]),
        chat_template=template,
    )
    for file in (*model.glob("chat_template*"), *model.glob("tokenizer*")):
        file.unlink()
    fast.save_pretrained(model)
    return load_task(str(model), "causal-lm")


def table_of(tmp_path: Path, *rows: dict):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_data(str(path))


def read(task, table, **options) -> tuple[str, str]:
    """Return the first row as the network gets it, and the part of it whose prediction counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EpimerWarning)
        options = {"batch_size": 1, "max_length": 4096} | options
        inputs, targets = next(iter(task.batches(table, range(len(table)), **options)))
    ids, targets = inputs["input_ids"][0].tolist(), targets[0].tolist()
    assert all(t in (-100, i) for t, i in zip(targets, [*ids[1:], -100], strict=True))
    return task.reader.decode(ids), task.reader.decode([t for t in targets if t != -100])


def refusal(task, table, **options) -> str:
    with pytest.raises(DataError) as caught:
        read(task, table, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def turns(*contents: str, first: str = "user") -> list[dict]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


CHAT = turns("Wie geht's?", "Gut\n", "Sicher, ja?", "ja")
CHATML_TEXT = (
    "<|im_start|>user\nWie geht's?<|im_end|>\n<|im_start|>assistant\nGut\n<|im_end|>\n"
    "<|im_start|>user\nSicher, ja?<|im_end|>\n<|im_start|>assistant\nja<|im_end|>\n"
)
FORMS = {
    "messages": {"messages": CHAT},
    "conversations": {
        "conversations": [
            {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in CHAT
        ]
    },
    "with the prompt beside it": {"prompt": "Wie geht's?", "messages": CHAT, "id": 3},
}


@pytest.mark.parametrize("form", FORMS)
def test_chats_are_in_the_models_template_and_each_turn_of_the_assistant_counts(model, tmp_path, form):
    text, counted = read(task_with(model, CHATML), table_of(tmp_path, FORMS[form]))
    assert text == CHATML_TEXT
    assert counted == "Gut\n<|im_end|>" + "ja<|im_end|>"


def test_prompts_and_completions_as_messages(model, tmp_path):
    task = task_with(model, CHATML)
    table = table_of(tmp_path, {"prompt": CHAT[:3], "completion": CHAT[3:]})
    assert read(task, table) == (CHATML_TEXT, "ja<|im_end|>")
    table = table_of(tmp_path, {"prompt": CHAT[:3], "completion": "ja"})
    assert refusal(task, table) == (
        "d.jsonl line 1 has a list of messages in one of 'prompt', 'completion' and a text in another; give texts, or "
        "lists, in both."
    )


def test_prompts_and_completions_as_texts_are_joined_as_they_are(model, tmp_path):
    table = table_of(tmp_path, {"prompt": "2+2=", "completion": "4"})
    assert read(task_with(model, CHATML), table) == ("2+2=4", "4")


def test_a_weight_of_0_leaves_a_turn_out(model, tmp_path):
    chat = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    assert read(task_with(model, CHATML), table_of(tmp_path, {"messages": chat})) == (CHATML_TEXT, "ja<|im_end|>")


TEMPLATES = {
    "stripped, no generation prompt": (
        INST,
        "<s>[INST] Wie geht's? [/INST] Gut</s>[INST] Sicher, ja? [/INST] ja</s>",
        " Gut</s> ja</s>",
    ),
    "a thought in the last turn only": (
        THOUGHT,
        "<|im_start|>user\nWie geht's?<|im_end|>\n<|im_start|>assistant\nGut\n<|im_end|>\n"
        "<|im_start|>user\nSicher, ja?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nja<|im_end|>\n",
        "Gut\n<|im_end|><think>\n\n</think>\n\nja<|im_end|>",
    ),
    "a thought in the prompt only": (
        FORCED,
        "U:Wie geht's?A:Gut\n</s>U:Sicher, ja?A:ja</s>",
        "Gut\n</s>ja</s>",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_found_in_any_template(model, tmp_path, name):
    template, text, counted = TEMPLATES[name]
    assert read(task_with(model, template), table_of(tmp_path, {"messages": CHAT})) == (text, counted)


def test_instructions_are_chats_where_there_is_a_template(model, tmp_path):
    task = task_with(model, CHATML)
    rows = [
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        {"instruction": "Sing.", "input": "", "output": "la"},
    ]
    texts = [
        ("<|im_start|>user\nAdd.\n\n2, 2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n", "4<|im_end|>"),
        ("<|im_start|>user\nSing.<|im_end|>\n<|im_start|>assistant\nla<|im_end|>\n", "la<|im_end|>"),
    ]
    assert [read(task, table_of(tmp_path, row)) for row in rows] == texts
    assert read(task, table_of(tmp_path, {"instruction": "Sing.", "output": "la"})) == texts[1]


def test_instructions_are_in_alpacas_form_where_there_is_none(model, tmp_path):
    task = task_with(model, None)
    table = table_of(tmp_path, {"instruction": "Add.", "input": "2, 2", "output": "4"})
    start = "Below is an instruction that describes a task, paired with an input that provides further context. "
    start += "Write a response that appropriately completes the request.\n\n"
    text = start + "### Instruction:\nAdd.\n\n### Input:\n2, 2\n\n### Response:\n4</s>"
    assert read(task, table) == (text, "4</s>")
    table = table_of(tmp_path, {"instruction": "Sing.", "input": "", "output": "la"})
    start = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    assert read(task, table) == (start + "\n\n### Instruction:\nSing.\n\n### Response:\nla</s>", "la</s>")


def test_the_columns_that_are_read_are_said(model, tmp_path):
    chats, alpaca = {"messages": CHAT}, {"instruction": "Sing.", "input": "", "output": "la"}
    expected = {
        "d.jsonl: chats in 'messages', in the chat template; the loss is that of the assistant's turns.": chats,
        "d.jsonl: instructions in 'instruction', 'input', 'output', in the chat template; "
        "the loss is that of 'output'.":
        alpaca,
        "d.jsonl: 'prompt', 'completion' are joined as they are; the loss is that of 'completion'.":
        {"prompt": "a", "completion": "b"},
    }  # fmt: skip
    task = task_with(model, CHATML)
    for said, row in expected.items():
        with pytest.warns(EpimerWarning, match=f"^{re.escape(said)}$"):
            task.batches(table_of(tmp_path, row), [0], batch_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task.batches(table_of(tmp_path, {"text": "a cat"}), [0], batch_size=1)
    with pytest.warns(EpimerWarning, match="in Alpaca's form, as the tokenizer has no chat template; the loss"):
        task_with(model, None).batches(table_of(tmp_path, alpaca), [0], batch_size=1)


AMBIGUOUS = [
    (
        {"instruction": "a", "input": "b", "output": "c", "text": "d"},
        "d.jsonl can be read in 2 ways: it has 'instruction', 'input', 'output', 'text'; choose with "
        "--text instruction,input,output or --text text (the last is the answer).",
        {"instruction,input,output": "c<|im_end|>", "text": ""},
    ),
    (
        {"prompt": "a", "completion": "b", "messages": CHAT},
        "d.jsonl can be read in 2 ways: it has 'prompt', 'completion', 'messages'; choose with "
        "--text messages or --text prompt,completion (the last is the answer).",
        {"messages": "Gut\n<|im_end|>ja<|im_end|>", "prompt,completion": "b"},
    ),
    (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "d.jsonl can be read in 3 ways: it has 'prompt', 'chosen', 'rejected'; choose with "
        "--text prompt or --text prompt,chosen or --text prompt,rejected (the last is the answer).",
        {"prompt,chosen": "b"},
    ),
    (
        {"input": "a", "output": "b"},
        "d.jsonl can be read in 2 ways: it has 'input', 'output'; choose with --text input or --text input,output "
        "(the last is the answer).",
        {"input,output": "b"},
    ),
]


@pytest.mark.parametrize(("row", "said", "ways"), AMBIGUOUS)
def test_columns_that_can_be_read_in_two_ways(model, tmp_path, row, said, ways):
    task, table = task_with(model, CHATML), table_of(tmp_path, row)
    assert refusal(task, table) == said
    for text, counted in ways.items():
        if counted:
            assert read(task, table, text=text)[1] == counted


FAULTS = [
    (CHATML, {"messages": "hi"}, "has 'hi' in 'messages', expected a list of messages."),
    (CHATML, {"messages": CHAT[:1]}, "has no turn of the assistant in 'messages'; leave it out."),
    (
        CHATML,
        {"messages": [{"role": "robot", "content": "x"}]},
        "has the message {'role': 'robot', 'content': 'x'} in 'messages', expected role (one of system, developer, "
        "user, assistant, tool) and content, or from (human, gpt) and value.",
    ),
    (
        CHATML,
        {"messages": [CHAT[0], {"role": "assistant", "content": [1]}]},
        "has the content [1] in 'messages', expected a text.",
    ),
    (
        INST,
        {"messages": turns("a", "b", first="assistant")},
        "does not fit the chat template: roles must alternate user/assistant; leave the row out.",
    ),
    (
        FORCED,
        {"messages": turns("a", "<think>hm</think>b")},
        "has message 1, whose text the chat template changes, so that it is not found in the chat; leave the row "
        "out, or write the chats as texts.",
    ),
    (
        None,
        {"messages": CHAT},
        "is a chat, but the tokenizer has no chat template; copy chat_template.jinja into the model's folder, or write "
        "the chats as texts.",
    ),
]


@pytest.mark.parametrize(("template", "row", "said"), FAULTS)
def test_chats_that_cannot_be_read(model, tmp_path, template, row, said):
    assert refusal(task_with(model, template), table_of(tmp_path, row)) == f"d.jsonl line 1 {said}"


def test_a_chat_that_is_cut_before_its_answer(model, tmp_path):
    task, table = task_with(model, CHATML), table_of(tmp_path, {"messages": turns("hello", "hi")})
    text, counted = read(task, table, max_length=25)
    assert counted == text[-len(counted) :] == "h"
    assert refusal(task, table, max_length=18) == (
        "d.jsonl line 1 has no answer within its first 18 tokens; raise --max-length, or leave the row out."
    )


def test_a_template_cannot_reach_python(model, tmp_path):
    """Templates are data of the checkpoint: they are rendered in jinja2's immutable sandbox."""
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    said = refusal(task_with(model, escape), table_of(tmp_path, {"messages": CHAT}))
    assert said.startswith("d.jsonl line 1 does not fit the chat template: access to attribute '__class__'")


def test_curvature_and_suites_read_chats(model, tmp_path):
    """The answers' positions are those that the folder keeps, and a suite's loss is theirs."""
    task_with(model, CHATML)
    path, chats = tmp_path / "d.jsonl", [CHAT, turns("2+2=", "4")]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    ran = run("curvature", model, "--task", "causal-lm", "--data", path, "-o", tmp_path / "c")
    assert ran.code == 0, ran.err
    assert "note: d.jsonl: chats in 'messages', in the chat template; the loss is that of the assistant's" in ran.out
    kept = Curvature.load(tmp_path / "c").inputs
    counted = [
        kept.tensors["input_ids"][i, 1:][kept.counted[i, :-1]].tolist() for i in torch.arange(2)
    ]  # what the counted positions predict
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert sorted(map(tokenizer.decode, counted)) == ["4<|im_end|>", "Gut\n<|im_end|>ja<|im_end|>"]

    suite = {"base": str(model), "task": "causal-lm", "metric": "loss", "batch_size": 1}
    suite["tasks"] = [{"name": "talk", "model": str(model), "data": {"test": str(path)}}]
    (tmp_path / "suite.yaml").write_text(json.dumps(suite))
    ran = run("eval", tmp_path / "suite.yaml", "--model", model, "--no-references", "-o", tmp_path / "scores.json")
    assert ran.code == 0, ran.err
    assert ran.out.count("note: d.jsonl: chats in 'messages', in the chat template") == 1
    network = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    losses = []
    for text, answers in ((CHATML_TEXT, ("Gut\n<|im_end|>", "ja<|im_end|>")), (None, ("4<|im_end|>",))):
        text = text or "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        p = network(torch.tensor([ids])).logits[0].detach().double().log_softmax(-1)
        places = []
        for answer in answers:
            start = len(
                tokenizer(text[: text.rindex("assistant\n" + answer) + 10], add_special_tokens=False)["input_ids"]
            )
            places += range(start, start + len(tokenizer(answer, add_special_tokens=False)["input_ids"]))
        losses.append(-sum(float(p[k - 1, ids[k]]) for k in places) / len(places))
    found = json.loads((tmp_path / "scores.json").read_text())["tasks"][0]["score"]
    assert found == pytest.approx(sum(losses) / 2, rel=1e-5)


# templates and tokenizers that would take for ever

DEEP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLED = "{% set x = namespace(t='x') %}{% for a in range(99) %}{% set x.t = x.t + x.t %}{% endfor %}{{ x.t }}"
ENDLESS = {
    "loops": DEEP,
    "memory": "{{ 'x' * 10 ** 12 }}",
    "text": "{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
    "doubling": DOUBLED,
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_without_end_is_refused_and_the_next_one_is_rendered(model, tmp_path, kind):
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    table = table_of(tmp_path, FORMS["messages"])
    said = refusal(task_with(model, ENDLESS[kind]), table)
    assert re.search(r"does not fit the chat template: it (takes more than (512 MiB|2 s)|makes \d+ characters)", said)
    assert read(task_with(model, CHATML), table)[0] == CHATML_TEXT
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 300_000  # KiB; a part of the text is read


def test_a_panic_of_the_tokenizer_is_one_line(model, tmp_path):
    """Its library gives up on a pattern after a number of steps, by an error that is no Exception."""
    task = task_with(model, CHATML)
    data = json.loads(task.reader.backend_tokenizer.to_str())
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+c"}, "behavior": "Isolated", "invert": False}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, data["pre_tokenizer"]]}
    task.reader._tokenizer = Tokenizer.from_str(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"the tokenizer of .* failed: .*; is its tokenizer\.json damaged"):
        read(task, table_of(tmp_path, {"messages": turns("a" * 60, "b")}))
