"""Files and answers that are made to take time, memory or other files: stores, archives, templates, rows, drafts."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.writer import Draft
from epimer.errors import EpimerError
from epimer.evaluation.unlabelled import suite_of_inputs
from epimer.tasks.conversations import Chat, render_chat
from epimer.tasks.data import open_data
from fuzz.harness import Reader
from fuzz.mutations import NAMES, damage_content, damage_files, hostile, mutated, mutated_bytes
from fuzz.readers.checkpoints import _build_adapter, _build_index, _build_quantized, _read_everything
from fuzz.readers.measured import METHODS, _build_curvature
from fuzz.readers.models import damage_numbers, merge, merge_and_compare, recipe, tensors, write_models
from fuzz.readers.networks import _build as _build_network
from fuzz.readers.remote import _put

SECRET = b"what lies outside of the folder"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
OTHERS = (torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64)

# answers of a store


class OddStore(MemoryFileSystem):
    """A store in memory of which one call answers something else."""

    call = ""
    change: Callable[[Any], Any] = staticmethod(lambda answer: answer)


def _odd(name: str) -> Callable[..., Any]:
    def answer(self: OddStore, *args: Any, **options: Any) -> Any:
        found = getattr(MemoryFileSystem, name)(self, *args, **options)
        return type(self).change(found) if type(self).call == name else found

    return answer


CALLS = ("ls", "find", "info", "cat_file", "cat_ranges", "_strip_protocol")
for _call in CALLS[:-1]:
    setattr(OddStore, _call, _odd(_call))


def _build_store(folder: Path) -> None:
    (folder / "models").mkdir()
    _build_index(folder / "models")


def _damage_store(rng: Random, folder: Path) -> None:
    (folder / "odd.json").write_text(json.dumps({"call": rng.choice(CALLS[:-1]), "seed": rng.randrange(10**9)}))


def _changed(seed: int) -> Callable[[Any], Any]:
    def change(answer: Any) -> Any:
        rng = Random(seed)
        if isinstance(answer, bytes):
            return rng.choice((mutated_bytes(rng, answer), answer[:-1], answer * 2, b"", None, "text", 7))
        if isinstance(answer, list) and answer and isinstance(answer[0], bytes):
            return rng.choice((answer[1:], [None] * len(answer), answer[::-1], "x", [b""] * len(answer)))
        plain = json.loads(json.dumps(answer, default=str))
        return json.loads(json.dumps(mutated(rng, plain), default=str)) if rng.random() < 0.9 else hostile(rng)

    return change


def _read_store(folder: Path) -> None:
    fsspec.register_implementation("memory", OddStore, clobber=True)
    OddStore.call = ""
    _put(folder / "models")
    if (folder / "odd.json").exists():
        odd = json.loads((folder / "odd.json").read_text())
        OddStore.change, OddStore.call = staticmethod(_changed(odd["seed"])), odd["call"]
    try:
        models = [{"model": f"memory://{name}"} for name in ("one", "two")]
        made = {"merge_method": "task_arithmetic", "base_model": "memory://base", "models": models}
        epimer.merge(made, folder / "out", progress=False, workers=1)
    finally:
        OddStore.call = ""


# adapters of mixed dtypes


def _damage_dtypes(rng: Random, folder: Path) -> None:
    for name in ("one", "two"):
        path = folder / name / "adapter_model.safetensors"
        state = load_file(path)
        save_file({key: W.to(rng.choice(FLOATS if rng.random() < 0.97 else OTHERS)) for key, W in state.items()}, path)
    (folder / "output").write_text(rng.choice(("model", "lora", "rank")))


def _read_dtypes(folder: Path) -> None:
    output = (folder / "output").read_text() if (folder / "output").exists() else "model"
    base = str(folder / "base")
    models = [{"model": f"{base}+{folder / name}"} for name in ("one", "two")]
    made: dict[str, Any] = {"merge_method": "task_arithmetic", "base_model": base, "models": models}
    if output == "model":
        merge_and_compare(made, folder / "out")
    else:
        merge({**made, "output": "lora", **({"lora_rank": 1} if output == "rank" else {})}, folder / "out")


# slices of layers


def _build_slices(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    (folder / "ranges.json").write_text(json.dumps([[0, 1], [1, 2]]))


def _damage_slices(rng: Random, folder: Path) -> None:
    if rng.random() < 0.5:
        path = folder / rng.choice(("one", "two")) / "model.safetensors"
        state = load_file(path)
        key = rng.choice([name for name in state if "layers" in name])
        number = rng.choice(("7" * 5000, "-1", "999999", "9999999999", "0", "1e5", "", "٣", "00001", "1.2"))
        state[key.replace("layers.0", f"layers.{number}").replace("layers.1", f"layers.{number}")] = state.pop(key)
        save_file(state, path)
        return
    ranges = mutated(rng, [[0, 1], [1, 2]])
    (folder / "ranges.json").write_text(json.dumps(ranges, default=str))


def _read_slices(folder: Path) -> None:
    ranges = json.loads((folder / "ranges.json").read_text())
    pairs = zip(("one", "two"), ranges if isinstance(ranges, list) else [ranges] * 2, strict=False)
    slices = [{"sources": [{"model": str(folder / name), "layer_range": span}]} for name, span in pairs]
    merge({"merge_method": "passthrough", "slices": slices}, folder / "out")


# FP8 with the tensors that come with it


def _build_siblings(folder: Path) -> None:
    _build_quantized(folder)
    for name in ("base", "one", "two"):
        path = folder / name / "model.safetensors"
        state = load_file(path)
        for i in (0, 1):
            state[f"model.layers.{i}.up.input_scale"] = torch.ones(())
            state[f"model.layers.{i}.up.k_scale"] = torch.ones(1)
        save_file(state, path)


def _damage_siblings(rng: Random, folder: Path) -> None:
    path = folder / rng.choice(("base", "one")) / "model.safetensors"
    if rng.random() < 0.3:
        state = load_file(path)
        key = rng.choice([name for name in state if "scale" in name])
        endings = ("_scale", "_scale_inv", ".weight_scale", "_zero_point", "_global_scale", ".absmax", "_packed")
        state[f"model.layers.0.up.weight{rng.choice(endings)}"] = state.pop(key)
        save_file(state, path)
    else:
        try:
            damage_numbers(rng, path)
        except (IndexError, NotImplementedError, RuntimeError):  # FP8 and scalars cannot be changed in every way
            damage_content(rng, path)


def _read_siblings(folder: Path) -> None:
    for name in ("base", "one", "two"):
        _read_everything(str(folder / name))
    merge(recipe(folder), folder / "out")


# inputs that curvature keeps


def _damage_inputs(rng: Random, folder: Path) -> None:
    place = folder / f"kronecker-{rng.choice(('one', 'two'))}"
    files = [path for path in place.glob("*.safetensors") if "input" in path.name] or sorted(place.glob("*.json"))
    (damage_numbers if rng.random() < 0.7 and files[0].suffix == ".safetensors" else damage_content)(rng, files[0])
    if rng.random() < 0.5:  # with no checksums, which would tell it
        header = json.loads((place / "curvature.json").read_text())
        for part in (header, header.get("inputs") or {}):
            part.pop("sha256", None)
            part.pop("checksums", None)
        (place / "curvature.json").write_text(json.dumps(header))


def _read_inputs(folder: Path) -> None:
    assert "kronecker" in METHODS
    for name in ("one", "two"):
        kept = epimer.Curvature.load(folder / f"kronecker-{name}").inputs
        if kept is not None:
            assert len(kept) >= 1
            assert suite_of_inputs is not None
            for value in kept.tensors.values():
                assert len(value) == len(kept)


# tokenizers that are asked for tokens

PATTERNS = (
    "(a|aa)+c",
    "(",
    "(?:a+)+$b",
    "(.*)*x",
    "\\p{L}+",
    "(?i:'s|'t)",
    "((a+)b?)+\\2c",
    "[^\\r\\n\\p{L}]?",
    "",
    "\\",
)


def _damage_tokenizer(rng: Random, folder: Path) -> None:
    path = folder / "model" / rng.choice(("tokenizer.json",) * 3 + ("tokenizer_config.json",))
    if rng.random() < 0.4 and path.name == "tokenizer.json":
        data = json.loads(path.read_text())
        pattern = {"Regex": rng.choice(PATTERNS)}
        part = rng.choice(("pre_tokenizer", "normalizer"))
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": rng.random() < 0.5}
        data[part] = split if part == "pre_tokenizer" else {"type": "Replace", "pattern": pattern, "content": "b" * 99}
        path.write_text(json.dumps(data))
    else:
        (damage_files if rng.random() < 0.05 else damage_content)(rng, path)


def _read_tokenizer(folder: Path) -> None:
    from epimer.tasks.task import load_task

    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text, "label": 0}) + "\n" for text in ("a" * 60, "one two", "é 🙂 x")))
    task = load_task(str(folder / "model"), "text-classification")
    for inputs, _ in task.batches(open_data(str(rows)), range(3), batch_size=3, max_length=32):
        assert inputs["input_ids"].shape[0] == 3


# chat templates

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PIECES = (
    "{{ 'x' * 10 ** 10 }}", "{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}", "{% set x = messages %}", "{%",
    "{{ range(10 ** 9) | list }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{#", "}}",
    "{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ messages[0].content * 9999 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ strftime_now('%Y') }}", "{{ cycler.__init__.__globals__ }}",
    "{{ messages | tojson(indent=4) }}", "{% generation %}x{% endgeneration %}", "{{ '%99999999d' | format(1) }}",
    "{% break %}", "{{ '\\ud800' }}", "{{ 10 ** 10 ** 10 }}", "{{ 9 ** 5000 }}", "\0", "{{ none.x }}",
)  # fmt: skip


class Template:
    """A tokenizer of which only the chat template is asked for."""

    is_fast, special_tokens_map = True, {"eos_token": "</s>"}

    def __init__(self, text: str) -> None:
        self.chat_template = text

    def get_chat_template(self, template: None, tools: Any) -> str:
        return self.chat_template


def _build_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHATML)


def _damage_template(rng: Random, folder: Path) -> None:
    text = CHATML
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(text))
        piece = rng.choice((*PIECES, *NAMES, text[at : at + 30]))
        text = rng.choice((text[:at] + piece + text[at:], text + piece, piece + text, text[:at]))
    (folder / "chat_template.jinja").write_bytes(text.encode("utf-8", "surrogatepass"))


def _read_template(folder: Path) -> None:
    text = (folder / "chat_template.jinja").read_bytes().decode("utf-8", "surrogatepass")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rendered, spans = render_chat(Template(text), Chat(messages), "rows.jsonl line 1")
    assert all(0 <= start <= stop <= len(rendered) for start, stop in spans)


# rows that name files


def _build_rows(folder: Path) -> None:
    from PIL import Image

    (folder / "data" / "images").mkdir(parents=True)
    Image.new("RGB", (3, 2)).save(folder / "data" / "images" / "a.png")
    Image.new("RGB", (5, 5)).save(folder / "outside.png")
    (folder / "data" / "rows.jsonl").write_text(json.dumps({"image": "images/a.png"}) + "\n")


def _damage_rows(rng: Random, folder: Path) -> None:
    places = (
        "/dev/zero",
        "/dev/stdin",
        "/proc/self/mem",
        "../outside.png",
        "pipe.png",
        "link.png",
        "images/a.png",
        "deep/x.png",
    )
    value: Any = rng.choice(
        (*places, *places, *NAMES, str(folder / "outside.png"), 3, None, [], {"path": "../outside.png"})
    )
    os.mkfifo(folder / "data" / "pipe.png")
    (folder / "data" / "link.png").symlink_to(rng.choice(("../outside.png", "/dev/zero", "link.png", "pipe.png")))
    (folder / "data" / "deep").symlink_to(rng.choice(("..", "/", "deep", "images")))
    (folder / "data" / "rows.jsonl").write_text(json.dumps({"image": value}) + "\n")


def _read_rows(folder: Path) -> None:
    table = open_data(str(folder / "data" / "rows.jsonl"))
    assert table.image(0, "image").size == (3, 2), "a file outside of the folder was read"


# Parquet


def _build_parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    rows = [{"text": "a" * i, "label": i % 2, "parts": [{"x": [i] * i}], "bytes": bytes(i)} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=10)


def _damage_parquet(rng: Random, folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "rows.parquet"
    if rng.random() < 0.7:
        path.write_bytes(mutated_bytes(rng, path.read_bytes()))
        return
    length, count = rng.choice(((1 << 18, 200), (1 << 18, 6000), (1, 1 << 20), (10, 3_000_000)))
    array = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int8()), ["x" * length])
    pq.write_table(pa.table({"text": array}), path, compression=rng.choice(("zstd", "snappy")), store_schema=False)


def _read_parquet(folder: Path) -> None:
    table = open_data(str(folder / "rows.parquet"))
    for i in {0, len(table) // 2, len(table) - 1}:
        assert isinstance(table.row(i), dict)


# images


def _build_images(folder: Path) -> None:
    from PIL import Image

    for name in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm"):
        for label in ("cat", "dog"):
            (folder / "images" / label).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (7, 5), (1, 2, 3)).save(folder / "images" / label / f"x.{name}")


def _damage_images(rng: Random, folder: Path) -> None:
    from PIL import Image

    path = rng.choice(sorted((folder / "images").rglob("*.*")))
    for other in sorted((folder / "images").rglob("*.*")):
        if other != path and other.suffix != ".png":
            other.unlink()
    kind = rng.random()
    if kind < 0.1:
        Image.new("1", rng.choice(((8000, 9000), (30_000, 3000), (1, 65_000)))).save(path.with_suffix(".png"))
    elif kind < 0.2:
        made = io.BytesIO()
        Image.new("RGB", (4, 4)).save(made, rng.choice(("EPS", "ICO", "PCX", "TGA", "PDF", "ICNS", "SGI")))
        path.write_bytes(made.getvalue())
    else:
        path.write_bytes(mutated_bytes(rng, path.read_bytes()))


def _read_images(folder: Path) -> None:
    table = open_data(str(folder / "images"))
    for i in range(len(table)):
        assert table.image(i, "image").mode == "RGB"


# drafts with links


def _build_draft(folder: Path) -> None:
    """Leave a merge that was stopped after its first tensor, and something beside it."""
    write_models(folder, "base", "one", "two")
    (folder / "mine").mkdir()
    (folder / "mine" / "precious").write_bytes(SECRET)


def _stopped_draft(folder: Path) -> None:
    wrote = Draft.wrote

    def once(self: Draft, *args: Any) -> None:
        wrote(self, *args)
        raise KeyboardInterrupt

    Draft.wrote = once  # type: ignore[method-assign]
    try:
        merge(recipe(folder), folder / "out")
    except KeyboardInterrupt:
        pass
    finally:
        Draft.wrote = wrote  # type: ignore[method-assign]


def _damage_draft(rng: Random, folder: Path) -> None:
    _stopped_draft(folder)
    root = folder / ".out.epimer"
    places = [root / name for name in ("model", "old", "gone", "journal.jsonl", "parcels")]
    places += [root / "model" / name for name in ("model.safetensors", "README.md", "config.json", "x", "1_Pooling")]
    place = rng.choice(places)
    targets = (folder / "mine", folder / "mine" / "precious", Path("/dev/zero"), Path("nowhere"), place)
    if place.is_dir():
        place.rename(folder / "moved")
    elif place.exists():
        place.unlink()
    if rng.random() < 0.2:
        place.hardlink_to(folder / "mine" / "precious")
    else:
        place.symlink_to(rng.choice(targets))


def _read_draft(folder: Path) -> None:
    with suppress(EpimerError):
        merge_and_compare(recipe(folder), folder / "out", overwrite=True)
    assert (folder / "mine" / "precious").read_bytes() == SECRET, "a link in the draft was followed"
    assert [path.name for path in (folder / "mine").iterdir()] == ["precious"]


# torch files that would grow


def _build_archive(folder: Path) -> None:
    torch.save(tensors(1), folder / "state.bin")


def _damage_archive(rng: Random, folder: Path) -> None:
    path = folder / "state.bin"
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    packed = rng.choice(list(content))
    kind = rng.randrange(4)
    if kind == 0:
        content[packed] = content[packed] + bytes(1 << 26)
    elif kind == 1:
        depth = rng.choice((20, 60, 5000))
        start = rng.choice((b"}", b"ccollections\nOrderedDict\n)R", b"]"))
        name = next(name for name in content if name.endswith("data.pkl"))
        content[name] = b"\x80\x02" + start + b")" + b"2\x86" * depth + rng.choice((b"Ns.", b"\x85Ns.", b"a.", b"2s."))
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            method = zipfile.ZIP_DEFLATED if name == packed and kind < 3 else zipfile.ZIP_STORED
            archive.writestr(name, data, method)
    if kind == 3:
        data = bytearray(path.read_bytes())
        for at in range(len(data) - 22, len(data)):
            if rng.random() < 0.1:
                data[at] = rng.randrange(256)
        path.write_bytes(bytes(data) + rng.choice((b"", b"x", b"PK\5\6" + bytes(18))))


def _read_archive(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder / "state.bin"))
    assert {name: tuple(W.shape) for name, W in checkpoint.headers.items()}.keys() <= tensors(1).keys() | {*NAMES}
    assert checkpoint.fingerprint


READERS = [
    Reader("store-replies", _build_store, _damage_store, _read_store, share=3),
    Reader("adapter-dtypes", _build_adapter, _damage_dtypes, _read_dtypes, share=2),
    Reader("slices", _build_slices, _damage_slices, _read_slices, share=2),
    Reader("fp8-siblings", _build_siblings, _damage_siblings, _read_siblings, share=2),
    Reader("kept-inputs", _build_curvature, _damage_inputs, _read_inputs, share=2),
    Reader("tokenizer-files", _build_network, _damage_tokenizer, _read_tokenizer, share=1),
    Reader("chat-templates", _build_template, _damage_template, _read_template, share=2),
    Reader("data-rows", _build_rows, _damage_rows, _read_rows, share=2),
    Reader("parquet", _build_parquet, _damage_parquet, _read_parquet, share=2),
    Reader("images", _build_images, _damage_images, _read_images, share=2),
    Reader("drafts", _build_draft, _damage_draft, _read_draft, share=2),
    Reader("torch-archives", _build_archive, _damage_archive, _read_archive, share=2),
]
