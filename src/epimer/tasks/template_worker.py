"""The process that renders chat templates for `chat_templates.py`; run as a script, without epimer's modules.

Requests are pickles, from the process that started this one; answers are JSON. The system ends this process where one
rendering uses too much processor time, and refuses it more memory than it may have.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
from pathlib import Path
from typing import Any

SECONDS = 2.0  # of processor time for one rendering
MEMORY = 1 << 29  # bytes beyond what is used before the first
MOST_CHARACTERS = 1 << 24  # of a rendered chat


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Render one chat; an answer has a `text` or a `problem`."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(**request)
        text = rendered[0][0]
    except MemoryError:
        return {"problem": f"it takes more than {MEMORY >> 20} MiB"}
    except Exception as error:  # a template raises what it likes
        return {"problem": " ".join(str(error)[:1000].split()) or type(error).__name__}
    if len(text) > MOST_CHARACTERS:
        return {"problem": f"it makes {len(text)} characters of one chat"}
    return {"text": text}


def main() -> None:
    """Answer requests until there are no more."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    import transformers.utils.chat_template_utils  # noqa: F401  (before memory is limited)

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    while size := int.from_bytes(requests.read(8), "little"):
        request = pickle.loads(requests.read(size))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        data = json.dumps(answer(request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(data).to_bytes(8, "little") + data)
        answers.flush()


if __name__ == "__main__":
    main()
