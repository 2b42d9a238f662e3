"""Chat templates that recipes can name, in Jinja, from the public definitions of their formats.

`tests/unit/recipe/test_chat_templates.py` spells out what each makes of a conversation.
"""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

ALPACA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% else %}"
    "{{ 'Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.' }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '\\n\\n### Instruction:\\n' + message['content'] | trim }}{% elif message['role'] == 'assistant' %}"
    "{{ '\\n\\n### Response:\\n' + message['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\n### Response:\\n' }}{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + "
    "'<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% set state = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set state.system = message['content'] | trim + '\\n\\n' %}"
    "{% elif message['role'] == 'user' %}{{ '[INST] ' + state.system + message['content'] | trim + ' [/INST]' }}"
    "{% set state.system = '' %}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)

EXAONE = (  # of EXAONE 3.0 and 3.5
    "{% if messages[0]['role'] != 'system' %}{{ '[|system|][|endofturn|]\\n' }}{% endif %}{% for message in messages %}"
    "{{ '[|' ~ message['role'] ~ '|]' ~ message['content'] }}"
    "{{ '\\n' if message['role'] == 'user' else '[|endofturn|]\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}"
)

TEMPLATES = {"alpaca": ALPACA, "chatml": CHATML, "exaone": EXAONE, "llama3": LLAMA3, "mistral": MISTRAL}
