"""Load a checkpoint's network for a task, without running code from it, and match its parameters to names on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.folder import inside, open_file, read_json
from epimer.checkpoints.lora import Adapted, model_config
from epimer.checkpoints.memory import StateDict
from epimer.errors import CheckpointError, CurvatureError, ParameterError, first_line, listed
from epimer.tasks.tables import import_extra

CAUSAL_LM, TEXT, IMAGE = "causal-lm", "text-classification", "image-classification"
SEQ2SEQ, IMAGE_TEXT, SPEECH = "seq2seq-lm", "image-text-to-text", "automatic-speech-recognition"
AUTO = {
    CAUSAL_LM: "AutoModelForCausalLM",
    TEXT: "AutoModelForSequenceClassification",
    IMAGE: "AutoModelForImageClassification",
    SEQ2SEQ: "AutoModelForSeq2SeqLM",
    IMAGE_TEXT: "AutoModelForImageTextToText",
    SPEECH: "AutoModelForSpeechSeq2Seq",
}
CTC = "AutoModelForCTC"  # instead, where the config's architecture says so
CLASSIFIERS = (TEXT, IMAGE)
POOLINGS = ("auto", "pooler", "cls", "mean")
DTYPES = ("float32", "bfloat16", "float16", "float64")
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.spm", "*.tiktoken")
Head = Path | Mapping[str, Tensor]
"""a linear head's `weight` and `bias`: a file, or tensors"""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
MOST_LAYERS = 10_000


class Output(NamedTuple):
    """The output of `WithHead`."""

    logits: Tensor


class WithHead(nn.Module):
    """A backbone with a linear head on its features: logits = features·Wᵀ + b."""

    def __init__(self, backbone: nn.Module, head: nn.Linear, pooling: str) -> None:
        super().__init__()
        self.backbone, self.head, self.pooling = backbone, head, pooling

    def forward(self, **inputs: Tensor) -> Output:
        """Return the logits of a batch."""
        features = self.features(inputs)
        if features.shape[-1] != self.head.in_features:
            counts = f"{self.head.in_features} features, but the model gives {features.shape[-1]}"
            raise CurvatureError(f"the head reads {counts}; was it trained on this model, with this pooling?")
        return Output(self.head(features))

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the pooled features of a batch, [N, features]."""
        out, pooling = self.backbone(**inputs), self.pooling
        if pooling == "auto" and getattr(out, "image_embeds", None) is not None:
            return out.image_embeds
        pooled = getattr(out, "pooler_output", None)
        if pooling in ("auto", "pooler") and pooled is not None:
            return pooled.flatten(1)
        hidden = getattr(out, "last_hidden_state", None)
        if pooling == "pooler" or hidden is None or hidden.dim() != 3:
            has = listed(key for key, value in out.items() if value is not None)
            raise CurvatureError(f"the model gives no features for pooling {pooling!r}: it has {has}; try another.")
        mask = inputs.get("attention_mask")
        if pooling == "cls" or (pooling == "auto" and "pixel_values" in inputs):
            return hidden[:, 0]
        if mask is None:
            return hidden.mean(1)
        weights = mask.to(hidden.dtype)[..., None]
        return (hidden * weights).sum(1) / weights.sum(1)


def check_device_option(device: str) -> None:
    """Refuse a --device that is not auto, cpu, cuda or cuda:N."""
    if device not in ("auto", "cpu", "cuda") and not re.fullmatch(r"cuda:\d+", device):
        raise ParameterError(f"--device must be auto, cpu, cuda or cuda:N, got {device!r}.")


def load_model(
    checkpoint: Checkpoint, task: str, head: Head | None, pooling: str, dtype: torch.dtype, *, progress: bool
) -> tuple[nn.Module, dict[str, str], list[str]]:
    """Return the network, parameter -> its tensor on disk, and the parameters that match none."""
    folder = check_folder(checkpoint)
    with quiet_transformers(shown=progress):
        if head is None:
            auto = CTC if task == SPEECH and _is_ctc(checkpoint) else AUTO[task]
            model, missing = _from_pretrained(auto, folder, checkpoint.where, dtype)
            if missing:
                _refuse_fresh(checkpoint.where, missing, task)
            _check_objective(model.config, checkpoint.where, task)
            return model, *_adapted(model, checkpoint)
        backbone, missing = _load_backbone(checkpoint, folder, task, pooling, dtype)
        fresh = [name for name in missing if "pooler" in name]
        if len(fresh) < len(missing) or (fresh and pooling == "pooler"):
            _refuse_fresh(checkpoint.where, missing, task, backbone=True)
        names, unmatched = _adapted(backbone, checkpoint)
    if fresh and pooling == "auto":  # an untrained pooler's output is noise
        pooling = "cls" if task == IMAGE else "mean"
    model = WithHead(backbone, read_head(head, dtype), pooling)
    return model, {f"backbone.{n}": disk for n, disk in names.items()}, [f"backbone.{name}" for name in unmatched]


def _is_ctc(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint's config says that it is a model of speech with a CTC head."""
    architectures = model_config(checkpoint).get("architectures")
    return isinstance(architectures, list) and any(str(name).endswith("ForCTC") for name in architectures)


def read_head(head: Head, dtype: torch.dtype) -> nn.Linear:
    """Return a linear head: `weight` [classes, features] and, where there is one, `bias` [classes]."""
    if isinstance(head, Path) and not os.path.exists(head):
        raise CheckpointError(f"the head {head} does not exist; give a file with 'weight' and 'bias'.")
    file, path = (open_file(head), str(head)) if isinstance(head, Path) else (StateDict(head, "head"), "in memory")
    shapes = {name: tuple(W.shape) for name, W in file.headers.items()}
    if "weight" not in shapes or not shapes.keys() <= {"weight", "bias"}:
        expected = "expected 'weight' (classes, features) and, if any, 'bias'"
        raise CheckpointError(f"the head {path} holds {listed(shapes)}; {expected}.")
    W = shapes["weight"]
    if len(W) != 2 or W[0] < 2 or shapes.get("bias", W[:1]) != W[:1]:
        expected = "expected 'weight' (classes, features), 'bias' (classes,), and at least 2 classes"
        raise CheckpointError(f"the head {path} has shapes {shapes}; {expected}.")
    linear = nn.Linear(W[1], W[0], bias="bias" in shapes, dtype=dtype).requires_grad_(False)
    linear.load_state_dict({name: file.read(name).to(dtype) for name in shapes})
    return linear


def check_folder(checkpoint: Checkpoint) -> Path:
    """Return the folder to load, after checking that it names no code and no adapter that transformers would load.

    Nor may it name more layers than a network has: transformers would build them one by one, for hours.
    """
    folder, where = checkpoint.folder, checkpoint.where
    if folder is None or not (folder / "config.json").is_file():
        raise CheckpointError(f"{where} has no config.json, so no model can be built; give a model folder or a hub id.")
    if (folder / "adapter_config.json").exists():
        problem = "holds adapter_config.json beside a whole model; only one can be meant"
        raise CheckpointError(f"{folder.name} {problem}: remove the other.")
    for name in ("config.json", "tokenizer_config.json", *PROCESSORS):
        config = read_json(inside(folder, name), f"{where}/{name}") if (folder / name).exists() else {}
        if code := _foreign_code(config):
            problem = f"{where}/{name} asks for code that is not part of transformers ({code}), which is never run"
            raise CheckpointError(f"{problem}; give a model that transformers knows by itself.")
        if key := _endless_layers(config):
            raise CheckpointError(f"{where}/{name} has {key!r} above {MOST_LAYERS}, which no network has; repair it.")
    return folder


def _foreign_code(config: Any) -> str:
    """Return the key in a config that would make transformers run foreign code, or an empty string."""
    entries = config.items() if isinstance(config, dict) else ()
    for key, value in entries:
        kernel = key.endswith(("attn_implementation", "experts_implementation")) and "/" in repr(value)  # a hub id
        if kernel or (key == "auto_map" and value):
            return key
    nested = config if isinstance(config, list) else [value for _, value in entries]
    return next(filter(None, map(_foreign_code, nested)), "")


def _endless_layers(config: Any) -> str:
    """Return the key of a number of layers in a config that no network has, or an empty string."""
    if not isinstance(config, dict):
        return ""
    for key, value in config.items():
        if "layer" in key and isinstance(value, int) and value > MOST_LAYERS:
            return str(key)
    return next(filter(None, map(_endless_layers, config.values())), "")


def transformers() -> Any:
    """Import transformers, or say how to install it."""
    return import_extra("transformers", "transformers", "measuring a task")


@contextmanager
def quiet_transformers(*, shown: bool) -> Iterator[None]:
    """Silence transformers' log messages, and its progress bars unless `shown`."""
    logging = transformers().logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def explained_panics(where: str) -> Iterator[None]:
    """Turn an error of the tokenizers' library into one line: a bare Exception, or a panic, which is none."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not _is_panic(error):
            raise
        remedy = "is its tokenizer.json damaged? Copy or download it again"
        raise CheckpointError(f"the tokenizer of {where} failed: {first_line(error)}; {remedy}.") from error


def _is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust, which is no Exception."""
    return type(error).__name__ == "PanicException"


def _from_pretrained(
    auto: str, folder: Path, where: str, dtype: torch.dtype, **more: Any
) -> tuple[nn.Module, list[str]]:
    """Return a network and the names of the tensors that are missing from its checkpoint."""
    try:
        model, info = getattr(transformers(), auto).from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True, **more
        )
    except Exception as error:  # transformers raises errors of many types for damaged files
        if "Unrecognized configuration class" in str(error):
            kind = read_json(inside(folder, "config.json"), f"{where}/config.json").get("model_type")
            remedy = ", or a head with --head" if auto in [AUTO[task] for task in CLASSIFIERS] else ""
            problem = f"{where} is a {kind} model, for which transformers has no {auto}"
            raise CheckpointError(f"{problem}; give a model of that kind{remedy}.") from error
        raise failed(where, "the model", error) from error
    return model, sorted(info["missing_keys"])


def failed(where: str, what: str, error: BaseException) -> CheckpointError:
    """Return the error for something that transformers could not load, with its own reason in one line."""
    return CheckpointError(f"{where}: {what} cannot be loaded by transformers: {first_line(error)}")


def _load_backbone(
    checkpoint: Checkpoint, folder: Path, task: str, pooling: str, dtype: torch.dtype
) -> tuple[nn.Module, list[str]]:
    """Load a network without a head; of a model of images and texts, the vision part."""
    where = checkpoint.where
    if task not in CLASSIFIERS:
        raise CurvatureError(f"a head is for classification; leave --head out for {task}.")
    try:
        config = transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # see _from_pretrained
        raise failed(where, "the config", error) from error
    config = getattr(config, "vision_config", config) if task == IMAGE else config
    projection = checkpoint.headers.get("visual_projection.weight")
    if task == IMAGE and config.model_type == "clip_vision_model" and projection is not None and pooling == "auto":
        config.projection_dim = len(projection)
        return _from_pretrained("CLIPVisionModelWithProjection", folder, where, dtype, config=config)
    return _from_pretrained("AutoModel", folder, where, dtype, config=config)


class SpeechReader(NamedTuple):
    """What turns recordings into features, and transcripts into tokens."""

    features: Any
    tokenizer: Any


def load_reader(checkpoint: Checkpoint, task: str) -> Any:
    """Load the checkpoint's tokenizer, image processor, processor of both, or reader of speech, as a task needs it."""
    folder, where = checkpoint.folder, checkpoint.where
    assert folder is not None
    options = {"local_files_only": True, "trust_remote_code": False}
    if task != IMAGE and not any(next(folder.glob(name), None) for name in VOCABULARIES):
        # transformers would build one with an empty vocabulary
        raise CheckpointError(f"{where} has no tokenizer; copy tokenizer.json and tokenizer_config.json into it.")
    what = {IMAGE: "image processor", IMAGE_TEXT: "processor", SPEECH: "feature extractor"}.get(task)
    if what is not None and not any((folder / name).is_file() for name in PROCESSORS):
        raise CheckpointError(f"{where} has no {what}; copy preprocessor_config.json into its folder.")
    try:
        with quiet_transformers(shown=False):
            if task == IMAGE:  # always Pillow: pixels must not depend on whether torchvision is installed
                return transformers().AutoImageProcessor.from_pretrained(folder, backend="pil", **options)
            if task == IMAGE_TEXT:
                return _load_processor(folder, options)
            tokenizer = transformers().AutoTokenizer.from_pretrained(folder, **options)
            if task == SPEECH:
                return SpeechReader(transformers().AutoFeatureExtractor.from_pretrained(folder, **options), tokenizer)
            return tokenizer
    except BaseException as error:  # see _from_pretrained
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise failed(where, f"the {what or 'tokenizer'}", error) from error


def _load_processor(folder: Path, options: Mapping[str, Any]) -> Any:
    """Load a processor of images and texts, whose tokenizer has its chat template."""
    auto = transformers().AutoProcessor
    try:
        processor = auto.from_pretrained(folder, backend="pil", **options)
    except (ImportError, ValueError):  # a part for videos that needs torchvision
        processor = auto.from_pretrained(folder, **options)
    if (template := getattr(processor, "chat_template", None)) is not None:
        processor.tokenizer.chat_template = template
    return processor


def _refuse_fresh(where: str, missing: list[str], task: str, *, backbone: bool = False) -> None:
    head = ", or a trained head with --head" if task in CLASSIFIERS and not backbone else ""
    problem = "which would be random numbers, and so would the curvature"
    raise CheckpointError(f"{where} lacks {listed(missing)}, {problem}; give the whole model{head}.")


def _check_objective(config: Any, where: str, task: str) -> None:
    """Refuse a model that was trained with another loss than the cross-entropy of a class or of the next token."""
    if task == CAUSAL_LM:
        for kind in getattr(config, "architectures", None) or ():
            if kind.endswith("ForMaskedLM"):
                raise CheckpointError(f"{where} is a {kind}, which sees the next token; give a causal model.")
    elif task in CLASSIFIERS and (
        config.num_labels < 2 or getattr(config, "problem_type", None) in ("regression", "multi_label_classification")
    ):
        problem = getattr(config, "problem_type", None) or "one output, a regression"
        raise CheckpointError(f"{where} was trained for {problem}; expected one of two or more classes per sample.")


def _adapted(model: nn.Module, checkpoint: Checkpoint) -> tuple[dict[str, str], list[str]]:
    """Match a network, loaded from the base, to its checkpoint, and apply the adapters to its weights.

    They are applied as `base+adapter` is read by a merge, so that the curvature is that of the same weights.
    """
    base, changed = checkpoint, set[str]()
    while isinstance(base, Adapted):
        changed |= base.updates.keys() | base.replaced.keys() | base.tokens.keys()
        base = base.base
    names, unmatched, used = match_names(model, base)
    parameters, done = dict(model.named_parameters()), set[str]()
    for name, disk in names.items():
        root = checkpoint.ties.get(disk, disk)
        shared = {disk, root, *(n for n, twin in checkpoint.ties.items() if twin == root)}
        if shared & changed:
            parameters[name].data.copy_(checkpoint.read(disk))
            done |= shared
    if lost := sorted((changed & used) - done):
        remedy = "merge it into its base with PEFT's merge_and_unload() and give the saved model"
        what = f"{listed(lost)}, which transformers holds in another form"
        raise CheckpointError(f"{checkpoint.where} changes {what}; {remedy}.")
    return names, unmatched


def match_names(model: nn.Module, checkpoint: Checkpoint) -> tuple[dict[str, str], list[str], set[str]]:
    """Return parameter -> tensor on disk, the parameters without one, and the tensors on disk that are used.

    A tensor matches a parameter by name, by transformers' table of renamings, or as the only one on disk of which one
    name ends with the other; shapes and some of the values must agree as well.
    """
    renamed, used = renamed_by_transformers(model, checkpoint)
    aliases: dict[int, list[str]] = {}
    for name, W in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(W), []).append(name)
    matched: dict[str, str] = {}
    for name, W in model.named_parameters():
        likely = (disk for alias in aliases[id(W)] for disk in (renamed.get(alias, alias), alias))
        if (disk := next((disk for disk in likely if holds(checkpoint, disk, W)), None)) is not None:
            matched[name] = disk
    unmatched, free = [], checkpoint.headers.keys() - set(matched.values())
    for name, W in model.named_parameters():
        if name in matched:
            continue
        likely = (disk for disk in free if any(ends_with(disk, alias) for alias in aliases[id(W)]))
        fitting = [disk for disk in likely if holds(checkpoint, disk, W)]
        if len(fitting) == 1:
            matched[name] = fitting[0]
        else:
            unmatched.append(name)
    return matched, unmatched, used | set(matched.values())


def ends_with(one: str, other: str) -> bool:
    """Whether one of two dotted names ends with the other."""
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")


def renamed_by_transformers(model: nn.Module, checkpoint: Checkpoint) -> tuple[dict[str, str], set[str]]:
    """Return name in memory -> name on disk by transformers' table of renamings, and the names on disk it loads."""
    try:
        mapping = import_module("transformers.conversion_mapping")
        loading = import_module("transformers.core_model_loading")
    except ImportError:  # before version 5 there was little renaming
        return {}, set()
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, loading.WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, loading.WeightConverter)]
    state, prefix = model.state_dict(), getattr(model, "base_model_prefix", None)
    renamed, used = dict[str, str](), set[str]()
    for disk in sorted(checkpoint.headers):
        name, converted = loading.rename_source_key(disk, renamings, converters, prefix, state)
        if name in state or converted is not None:
            used.add(disk)
        if name in state and converted is None:
            renamed.setdefault(name, disk)
    return renamed, used


def holds(checkpoint: Checkpoint, disk: str, W: Tensor) -> bool:
    """Whether a tensor on disk has a parameter's shape and, in its first, middle and last row, its values."""
    if disk not in checkpoint.headers or checkpoint.headers[disk].shape != W.shape:
        return False
    if not W.dim() or not W.numel():
        return torch.equal(checkpoint.read(disk).to(W.dtype), W.detach())
    rows = ((checkpoint.read(disk, (i, i + 1)), W.detach()[i : i + 1]) for i in {0, len(W) // 2, len(W) - 1})
    return all(torch.allclose(stored.to(W.dtype), row, 0, 0, equal_nan=True) for stored, row in rows)
