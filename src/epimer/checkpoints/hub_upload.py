"""Upload a finished folder to a model repository of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from epimer.checkpoints.hub import http_failures, is_hub_id, page, progress_bars
from epimer.errors import OutputError


def check_upload(repo: str) -> None:
    """Refuse a name that is no repository's, or an upload by someone who is not logged in, before there is a folder."""
    from huggingface_hub import HfApi

    if not is_hub_id(repo) or "/" not in repo or "@" in repo:
        raise OutputError(f"{repo} is no repository to push to; expected ORG/NAME, as on the hub.")
    with explain_upload_errors(repo, "nothing was merged"):
        HfApi().whoami()


def upload_folder(folder: Path, repo: str, *, progress: bool = False) -> str:
    """Upload a folder to a repository, which is made where there is none, in one commit; return its page."""
    from huggingface_hub import HfApi

    api = HfApi()
    with explain_upload_errors(repo, f"{folder} is complete: hf upload {repo} {folder}"), progress_bars(shown=progress):
        api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Merged with epimer")
    return page(repo, "model")


@contextmanager
def explain_upload_errors(repo: str, state: str) -> Iterator[None]:
    """Turn what goes wrong in an upload into one line, which ends with the `state` things are left in."""
    from huggingface_hub import errors

    failures: tuple[type[BaseException], ...] = (*http_failures(), ValueError, RuntimeError)
    try:
        yield
    except failures as error:
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, failures):  # of one large file of several
            error = error.__cause__
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        if status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
            answer = f" ({status})" if status else ""
            problem = f"you may not write to {page(repo, 'model')}{answer}; log in with a token that may: hf auth login"
        else:
            problem = f"{repo} cannot be pushed to the hub ({reason})"
        raise OutputError(f"{problem}; {state}") from error
