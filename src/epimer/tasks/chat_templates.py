"""Chat templates, which are programs of strangers: rendered in a process with little time and memory.

jinja2's sandbox keeps a template from Python's objects, but not from loops inside loops, or from texts without end.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from epimer.json_values import json_value
from epimer.tasks import template_worker


class TemplateError(ValueError):
    """A chat template that does not fit a chat, or that takes too long; the text says why."""


def render_template(reader: Any, messages: Sequence[Any], tools: Any, *, prompt: bool) -> str:
    """Return messages in a tokenizer's chat template, as its `apply_chat_template` renders it.

    Args:
        reader: the tokenizer.
        messages: the chat.
        tools: functions that the template may describe, or None.
        prompt: whether the beginning of the assistant's next turn follows.

    Raises:
        TemplateError: The template refuses the chat, or takes too much time or memory.
    """
    template = reader.get_chat_template(None, tools)
    options = {"add_generation_prompt": prompt, "continue_final_message": False, **reader.special_tokens_map}
    request = {"conversations": [list(messages)], "tools": tools, "chat_template": template, **options}
    return _worker(os.getpid()).render(request)


@lru_cache(maxsize=1)
def _worker(process: int) -> _Worker:
    """Return the worker of a process; one that is forked starts its own."""
    return _Worker()


class _Worker:
    """A process that renders templates, started for the first and again after one that it was ended for."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()
        atexit.register(self._stop)

    def render(self, request: dict[str, Any]) -> str:
        """Return what the worker renders."""
        with self._lock:
            answer = self._ask(pickle.dumps(request))
        if "problem" in answer:
            raise TemplateError(answer["problem"])
        return str(answer["text"])

    def _ask(self, request: bytes) -> dict[str, str]:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(len(request).to_bytes(8, "little") + request)
            process.stdin.flush()
            size = int.from_bytes(process.stdout.read(8), "little")
            data = process.stdout.read(size)
        except BrokenPipeError:
            data = b""
        if data:
            return json_value(data)
        self._stop()
        return {"problem": f"it takes more than {template_worker.SECONDS:g} s of processor time, or crashes"}

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", str(Path(template_worker.__file__))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, env=environment)
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
