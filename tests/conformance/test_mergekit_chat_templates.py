"""What docs/recipes.md says of mergekit's chat templates, rendered as transformers renders them.

Runs in an environment of its own: `make conformance`.
"""

from importlib.resources import files

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from epimer.recipe.chat_templates import TEMPLATES

ROLES = ("system", "user", "assistant", "user")
CHAT = [
    {"role": role, "content": text} for role, text in zip(ROLES, ("Be brief.", "Hi!", "Hello.", "Bye."), strict=True)
]
SENTENCE = "Below is an instruction that describes a task. Write a response that appropriately completes the request."


def render(template: str, messages: list[dict[str, str]], ask: bool) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return environment.from_string(template).render(messages=messages, add_generation_prompt=ask, **special)


@pytest.mark.parametrize("ask", [True, False])
@pytest.mark.parametrize("messages", [CHAT[1:2], CHAT[1:], CHAT], ids=["one turn", "three", "with system"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_differences(name, messages, ask):
    pytest.importorskip("mergekit")
    theirs = render((files("mergekit") / f"_data/chat_templates/{name}.jinja").read_text(), messages, ask)
    ours = render(TEMPLATES[name], messages, ask)
    match name:
        case "chatml":
            assert theirs == ours
        case "llama3":
            assert theirs.replace("<|eot_id|>\n", "<|eot_id|>") == ours
        case "mistral":
            assert theirs.replace(" [INST]", "[INST]") == ours
        case "exaone":
            assert theirs != ours
            assert "".join(theirs.split()) == "".join(ours.split())
        case "alpaca":
            start = "Be brief." if messages is CHAT else f"{SENTENCE}"
            plain = ours.replace("</s>", "").removeprefix(f"<s>{start}")
            plain = plain.removesuffix("\n\n### Response:\n") + "### Response:\n" if ask else plain
            assert theirs == ("Be brief." if messages is CHAT else "") + plain
