"""Ten chat templates in the form that their models are documented with, each with a small tokenizer of its tokens.

The text of an answer is tokenised byte by byte. What a template does with thoughts, tools and ends is kept; long
instructions are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class Published:
    """A template, and the special tokens of its tokenizer."""

    template: str
    special: tuple[str, ...]
    eos: str | None
    bos: str | None = None
    adds_bos: bool = False
    words: tuple[str, ...] = ()
    """Tokens that are added and not special."""
    strips: tuple[str, ...] = ()
    """Special tokens that take in the white space behind them."""

    def tokenizer(self) -> Any:
        """Bytes, and the tokens of the template."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False, rstrip=token in self.strips)
                for token in self.special
            ]
        )
        inner.add_tokens([AddedToken(word, special=False, normalized=False) for word in self.words])
        if self.adds_bos:
            inner.post_processor = processors.TemplateProcessing(
                single=f"{self.bos} $A",
                pair=f"{self.bos} $A $B",
                special_tokens=[(self.bos, inner.token_to_id(self.bos))],
            )
        fast: Any = PreTrainedTokenizerFast  # transformers ships no types for it
        made = fast(tokenizer_object=inner, bos_token=self.bos, eos_token=self.eos)
        made.chat_template = self.template
        return made


CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "{% if message.content or not loop.first %}{{ '\\n' }}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)

CHATML = Published(
    template=(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
        " + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|endoftext|>",
)
QWEN_2_5 = Published(
    template=(
        "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
        "{% else %}<|im_start|>system\nYou are Qwen.{% endif %}"
        "{% for tool in tools or [] %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
        "{% for message in messages %}"
        "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
        "<|im_end|>\n"
        "{% elif message.role != 'system' or not loop.first %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{{ message.content or '' }}" + CALLS + "<|im_end|>\n"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    words=("<tool_call>", "</tool_call>"),
    eos="<|im_end|>",
)
QWEN_3 = Published(
    template=(
        "{% set ns = namespace(last=0) %}"
        "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}"
        "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
        "{% endif %}"
        "{% for message in messages %}"
        "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
        "<|im_end|>\n"
        "{% elif message.role == 'assistant' %}"
        "{% set content = message.content or '' %}{% set thought = message.reasoning_content or '' %}"
        "{% if not thought and '</think>' in content %}"
        "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|im_start|>assistant\n"
        "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
        "{{ content.lstrip('\n') }}{% else %}{{ content }}{% endif %}" + CALLS + "<|im_end|>\n"
        "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
        "{% endif %}"
    ),
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    words=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    eos="<|im_end|>",
)
LLAMA_3 = Published(
    template=(
        "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for message in messages %}"
        "<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
        "{% if message.tool_calls %}"
        '{"name": "{{ message.tool_calls[0].function.name }}", "parameters":'
        " {{ message.tool_calls[0].function.arguments | tojson }}}"
        "{% else %}{{ message.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    special=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ),
    bos="<|begin_of_text|>",
    adds_bos=True,
    eos="<|eot_id|>",
)
GEMMA = Published(
    template=(
        "{{ bos_token }}"
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
        "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    bos="<bos>",
    adds_bos=True,
    eos="<eos>",
)
PHI_3 = Published(
    template=(
        "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    special=("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    strips=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    bos="<s>",
    eos="<|endoftext|>",
)
MISTRAL = Published(
    template=(
        "{{ bos_token }}{% set ns = namespace(last=-1) %}"
        "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}"
        "{% for message in messages %}"
        "{% if loop.first and message.role == 'assistant' %}"
        "{{ raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if message.role == 'user' %}"
        "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "[INST] {{ message.content }}[/INST]"
        "{% elif message.role == 'system' %}{{ message.content }}\n\n"
        "{% elif message.role == 'tool' %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]"
        "{% elif message.tool_calls %}[TOOL_CALLS] {{ message.tool_calls[0].function | tojson }}{{ eos_token }}"
        "{% else %} {{ message.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    special=(
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    bos="<s>",
    adds_bos=True,
    eos="</s>",
)
DEEPSEEK_R1 = Published(
    template=(
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content }}"
        "{% elif message.role == 'user' %}<｜User｜>{{ message.content }}"
        "{% elif message.role == 'tool' %}<｜tool▁outputs▁begin｜>{{ message.content }}<｜tool▁outputs▁end｜>"
        "{% else %}{% set content = message.content or '' %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "<｜Assistant｜>{{ content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
    ),
    special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    words=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    bos="<｜begin▁of▁sentence｜>",
    adds_bos=True,
    eos="<｜end▁of▁sentence｜>",
)
GLM_4_5 = Published(
    template=(
        "[gMASK]<sop>{% if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
        "{% set ns = namespace(last=-1) %}"
        "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}"
        "{% for message in messages %}{% if message.role == 'user' %}<|user|>\n{{ message.content }}"
        "{% elif message.role == 'assistant' %}<|assistant|>"
        "{% if loop.index0 > ns.last and message.reasoning_content %}"
        "{{ '\n<think>' + message.reasoning_content.strip() + '</think>' }}"
        "{% else %}{{ '\n<think></think>' }}{% endif %}"
        "{% if message.content %}{{ '\n' + message.content.strip() }}{% endif %}"
        "{% for call in message.tool_calls or [] %}"
        "{{ '\n<tool_call>' + call.function.name }}{% for key, value in call.function.arguments.items() %}"
        "\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}"
        "{% elif message.role == 'tool' %}<|observation|>\n<tool_response>\n{{ message.content }}\n</tool_response>"
        "{% else %}<|system|>\n{{ message.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>"
        "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"
    ),
    special=(
        "<|endoftext|>",
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
    ),
    words=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    eos="<|endoftext|>",
)
GPT_OSS = Published(
    template=(
        "<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>"
        "{% if tools %}<|start|>developer<|message|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>"
        "{% endif %}"
        "{% for message in messages %}"
        "{% if message.role in ('system', 'developer') %}<|start|>developer<|message|>{{ message.content }}<|end|>"
        "{% elif message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|end|>"
        "{% elif message.role == 'tool' %}"
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>"
        "{% elif message.tool_calls %}"
        "<|start|>assistant<|channel|>commentary to=functions.{{ message.tool_calls[0].function.name }}"
        " <|constrain|>json<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% else %}"
        "{% if loop.last and message.reasoning_content %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ message.reasoning_content }}<|end|>{% endif %}"
        "<|start|>assistant<|channel|>final<|message|>{{ message.content }}"
        "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    special=(
        "<|startoftext|>",
        "<|endoftext|>",
        "<|return|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|call|>",
    ),
    bos="<|startoftext|>",
    eos="<|return|>",
)

PUBLISHED = {
    "Qwen2.5": QWEN_2_5,
    "Qwen3": QWEN_3,
    "Llama-3": LLAMA_3,
    "Gemma": GEMMA,
    "Phi-3": PHI_3,
    "Mistral": MISTRAL,
    "DeepSeek-R1": DEEPSEEK_R1,
    "GLM-4.5": GLM_4_5,
    "gpt-oss": GPT_OSS,
    "ChatML base": CHATML,
}
