"""Chat templates by name: rendered as transformers renders them, the texts that the formats' publishers show."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from epimer.recipe.load import load_recipe

SYSTEM, USER, ANSWER, AGAIN = (
    {"role": role, "content": text}
    for role, text in [("system", "Be brief."), ("user", "Hi!"), ("assistant", "Hello."), ("user", " Bye. ")]
)
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
FORMATS = {
    "alpaca": {
        (False, True): f"<s>{ALPACA}### Instruction:\nHi!\n\n### Response:\n",
        (True, True): "<s>Be brief.\n\n### Instruction:\nHi!\n\n### Response:\nHello.</s>\n\n### Instruction:\nBye."
        "\n\n### Response:\n",
    },
    "llama3": {
        (False, True): "<s><|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        (True, False): "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye.<|eot_id|>",
    },
    "mistral": {
        (False, True): "<s>[INST] Hi! [/INST]",
        (True, True): "<s>[INST] Be brief.\n\nHi! [/INST] Hello.</s>[INST] Bye. [/INST]",
    },
    "exaone": {
        (False, True): "[|system|][|endofturn|]\n[|user|]Hi!\n[|assistant|]",
        (
            True,
            False,
        ): "[|system|]Be brief.[|endofturn|]\n[|user|]Hi!\n[|assistant|]Hello.[|endofturn|]\n[|user|] Bye. \n",
    },
    "chatml": {
        (False, True): "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n",
        (True, False): "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n Bye. <|im_end|>\n",
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_conversation_is_written_as_the_format_has_it(name):
    given = {"merge_method": "average", "models": [{"model": "a"}], "chat_template": name}
    template = load_recipe(given).chat_template
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for (long, ask), expected in FORMATS[name].items():
        messages = [SYSTEM, USER, ANSWER, AGAIN] if long else [USER]
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        found = environment.from_string(template).render(messages=messages, add_generation_prompt=ask, **special)
        assert found == expected
