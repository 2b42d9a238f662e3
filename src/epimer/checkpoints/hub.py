"""Models by hub id: from the local cache, or fetched into it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from epimer.checkpoints.folder import (
    DIFFUSERS,
    INDEXES,
    NOT_WEIGHTS,
    PIPELINE,
    SINGLES,
    pipeline_refusal,
    refuse_formats,
)
from epimer.checkpoints.sidecar_files import TEMPLATES
from epimer.errors import CheckpointError, EpimerError, first_line, listed, short

REPO = r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?"
HUB_NAME = re.compile(rf"({REPO})@[0-9a-f]{{40}}")
HUB_ID = re.compile(rf"{REPO}(@[\w./-]+)?")
REVISION = re.compile(
    r"[\w-][\w.-]*(?:/[\w-][\w.-]*)*"
)  # of a branch, a tag or a commit: names of folders in the cache
COMMIT = re.compile(r"[0-9a-f]{40,64}")
MODULE = re.compile(r"\d+_\w+")  # the folder of a module of sentence-transformers
SIDECARS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", "README.md")


def is_hub_id(text: str) -> bool:
    """Whether a text reads as `name`, `org/name` or either with `@revision`."""
    return HUB_ID.fullmatch(text) is not None and len(text.split("@")[0]) <= 96


def fetch(text: str, *, progress: bool = False) -> tuple[Path, str]:
    """Return the folder of a hub model, downloaded where it is not cached, and `id@commit`."""
    return fetch_repo(text, "model", lambda files: needed(files, text), CheckpointError, progress=progress)


def fetch_code(name: str) -> None:
    """Fetch the Python files of a model, by its `id@commit`, to where its other files are."""

    def code(files: Sequence[str]) -> list[str]:
        return [file for file in files if file.endswith(".py") and "/" not in file]

    fetch_repo(name, "model", code, CheckpointError, progress=False)


def fetch_repo(
    text: str, kind: str, choose: Callable[[Sequence[str]], list[str]], failure: type[EpimerError], *, progress: bool
) -> tuple[Path, str]:
    """Return the folder of the hub's `id` or `id@revision`, a model or a dataset by its `kind`, and `id@commit`.

    `choose` says which of its files to fetch; `failure` is the error that is raised.
    """
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    repo, _, revision = text.partition("@")
    wanted = revision or None
    if wanted is not None and (not REVISION.fullmatch(wanted) or ".." in wanted):
        raise failure(f"{text}: {short(wanted)} is no revision; give a branch, a tag or a commit of the repository.")
    try:
        if constants.HF_HUB_OFFLINE:
            raise errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        with progress_bars(shown=progress), explain_refusals(repo, kind, revision, failure), sensible(text, failure):
            info: Any = HfApi().repo_info(repo, repo_type=kind, revision=wanted)
            if not COMMIT.fullmatch(str(info.sha)):
                problem = f"the hub's answer is not about a repository (its commit is {short(info.sha)})"
                raise failure(f"{text}: {problem}; try again later.")
            files = choose([sibling.rfilename for sibling in info.siblings or ()])
            patterns = [re.sub(r"([*?[])", r"[\1]", file) for file in files]
            folder = Path(snapshot_download(repo, repo_type=kind, revision=wanted, allow_patterns=patterns))
    except http_failures() as error:
        try:
            folder = Path(snapshot_download(repo, repo_type=kind, revision=wanted, local_files_only=True))
        except (errors.LocalEntryNotFoundError, OSError, ValueError) as missing:
            # The cache holds the files we fetched and no others, which this error calls incomplete.
            cached = getattr(missing, "snapshot_path", None)
            if cached is None:
                options = " --repo-type dataset" if kind == "dataset" else ""
                options += f" --revision {revision}" if revision else ""
                refused = getattr(getattr(error, "response", None), "status_code", None)
                reason = first_line(error)[:120]
                if refused in (401, 403):
                    login = f"ask for access on {page(repo, kind)} and log in: hf auth login"
                    raise failure(f"{text}: the hub refused it ({refused}); {login}") from error
                problem = f"refused it ({refused})" if refused else f"cannot be reached ({reason})"
                raise failure(
                    f"{text} is neither a path here nor in the hub's cache, and the hub {problem}; "
                    f"download it where there is a network: hf download {repo}{options}"
                ) from error
            folder = Path(cached)
    return folder, f"{repo}@{folder.resolve().name}"


@contextmanager
def sensible(text: str, failure: type[EpimerError]) -> Iterator[None]:
    """Turn what huggingface_hub raises at an answer that is none of the hub's into one line."""
    try:
        yield
    except EpimerError:
        raise
    except http_failures():
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError) as error:
        if type(error).__module__.startswith("huggingface_hub"):  # a refusal of its own, which others explain
            raise
        reason = short(str(error))
        raise failure(f"{text}: the hub's answer is not about a repository ({reason}); try again later.") from error


def http_failures() -> tuple[type[BaseException], ...]:
    """Return the errors by which huggingface_hub says that something was refused or cannot be reached."""
    from huggingface_hub import errors

    ancestors = errors.HfHubHTTPError.__mro__  # with the base class of whichever HTTP library huggingface_hub uses
    unreachable: type[BaseException] = next((a for a in ancestors if a.__name__ == "HTTPError"), ConnectionError)
    return errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError, unreachable


@contextmanager
def progress_bars(*, shown: bool) -> Iterator[None]:
    """Hide the progress bars of huggingface_hub, unless they are to be shown."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide = not shown and not are_progress_bars_disabled()
    try:
        if hide:
            disable_progress_bars()
        yield
    finally:
        if hide:
            enable_progress_bars()


@contextmanager
def explain_refusals(repo: str, kind: str, revision: str, failure: type[EpimerError]) -> Iterator[None]:
    """Turn what the hub says about a repository that one may not see, or that is not there, into one line."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise failure(f"{repo} is gated; accept its terms on {page(repo, kind)} and log in: hf auth login") from error
    except errors.RevisionNotFoundError as error:
        raise failure(f"{repo} has no revision {revision!r} on the hub; see its page for branches.") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        name = f"{repo}@{revision}" if revision else repo
        raise failure(
            f"{name} is neither a path here nor a {kind} on the hub (a private one needs `hf auth login`)."
        ) from error


def page(repo: str, kind: str) -> str:
    """Return the address of a repository's page."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repo}"


def beside_weights(file: str, files: Sequence[str]) -> bool:
    """Whether a file goes with the weights: config, tokenizer, or a module of sentence-transformers as 2_Dense."""
    folder, _, name = file.rpartition("/")
    if folder in TEMPLATES or not folder:
        return file.endswith(SIDECARS)
    twin = f"{folder}/model.safetensors"
    return MODULE.fullmatch(folder) is not None and (
        name.endswith((*SIDECARS, ".safetensors")) or (name.endswith(".bin") and twin not in files)
    )


def needed(files: Sequence[str], text: str) -> list[str]:
    """Return which files of a repository to fetch: one set of weights, config and tokenizer."""
    top = [file for file in files if "/" not in file]
    if PIPELINE in top and not {*SINGLES, *INDEXES} & {*top}:
        weights = [file for file in files if file.endswith((".safetensors", ".bin"))]
        parts = {file.split("/")[0] for file in weights if file.count("/") == 1}
        repo = text.split("@")[0]
        folder = repo.rpartition("/")[2]
        refusal = pipeline_refusal(folder, parts).removesuffix(".")
        raise CheckpointError(f"{refusal}; download it first: hf download {repo} --local-dir {folder}")
    for prefix, suffix in (
        ("model", ".safetensors"),
        (DIFFUSERS, ".safetensors"),
        ("", ".safetensors"),
        ("pytorch_model", ".bin"),
        ("", ".bin"),
    ):
        weights = [f for f in top if f.startswith(prefix) and f.endswith(suffix) and f not in NOT_WEIGHTS]
        if weights:
            return weights + [file for file in files if beside_weights(file, files)]
    refuse_formats(files, text)
    raise CheckpointError(f"{text} holds no weights on the hub: neither .safetensors nor .bin among {listed(top)}.")
