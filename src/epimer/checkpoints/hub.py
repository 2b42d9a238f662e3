"""Models by hub id: from the local cache, or fetched into it."""

from __future__ import annotations

import re
from pathlib import Path

from epimer.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
CARRIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm")
WEIGHTS = ("*.safetensors", "*.bin")


def is_hub_id(text: str) -> bool:
    """Whether a text reads as `name`, `org/name` or either with `@revision`."""
    return HUB_ID.fullmatch(text) is not None and len(text.split("@")[0]) <= 96


def fetch(text: str, *, progress: bool = False) -> tuple[Path, str]:
    """Return the folder of a hub model, downloaded where it is not cached, and `id@commit`."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    repo, _, revision = text.partition("@")
    wanted = revision or None
    patterns = [*CARRIED, WEIGHTS[0]]
    quiet = are_progress_bars_disabled()
    try:
        if not progress:
            disable_progress_bars()
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        info = HfApi().model_info(repo, revision=wanted)
        files = [sibling.rfilename for sibling in info.siblings or ()]
        if not any(file.endswith(".safetensors") for file in files):
            patterns = [*CARRIED, WEIGHTS[1]]
        folder = Path(snapshot_download(repo, revision=info.sha or wanted, allow_patterns=patterns))
    except GatedRepoError as error:
        raise CheckpointError(f"{repo} is gated; accept its terms on the hub and log in: hf auth login") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r} on the hub; see its page for branches.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"{text} is neither a path here nor a model on the hub (a private one needs `hf auth login`)."
        ) from error
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError, _network_errors()) as error:
        try:
            folder = Path(snapshot_download(repo, revision=wanted, local_files_only=True))
        except (LocalEntryNotFoundError, OSError, ValueError):
            raise CheckpointError(
                f"{text} is neither a path here nor in the hub's cache, and the hub cannot be reached "
                f"({_reason(error)}); download it where there is a network: hf download {repo}"
            ) from error
    finally:
        if not progress and not quiet:
            enable_progress_bars()
    return folder, f"{repo}@{folder.resolve().name}"


def _network_errors() -> type[BaseException]:
    """Return the exception of whichever HTTP library huggingface_hub uses."""
    from huggingface_hub.errors import HfHubHTTPError

    ancestors = [kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError"]
    return ancestors[0] if ancestors else ConnectionError


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
