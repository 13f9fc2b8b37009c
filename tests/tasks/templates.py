"""Chat templates in the documented formats of families, and a tokenizer of bytes that has them."""

from jaxrl_llm.models.tokenizer import Tokenizer

_QWEN = r"""
{%- if tools %}<|im_start|>system
Functions: <tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>. Call as <tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call><|im_end|>
{% endif %}{% for m in messages %}
{%- set before = messages[loop.index0 - 1].role if not loop.first else "" %}
{%- if m.role == "tool" %}{% if before != "tool" %}<|im_start|>user{% endif %}{{ "\n" }}<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- elif m.role == "assistant" %}<|im_start|>assistant
THOUGHT{{ m.content }}{% for call in m.tool_calls %}
{% if m.content or not loop.first %}{{ "\n" }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN25 = _QWEN.replace("THOUGHT", "")
# a thought is kept in the last turn alone: what came before is not the beginning of what comes later
QWEN3 = _QWEN.replace("THOUGHT", "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}")
LLAMA31 = """<|begin_of_text|>
{%- for m in messages %}
{%- if m.role == "tool" %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception("one call") }}{% endif %}
{%- set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# it tells of tools in its own way before the last thing that the user says, and calls in its own way
MISTRAL = """<s>{% for m in messages %}
{%- if m.role in ["user", "system"] %}{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}
{%- endif %}{% if tools and loop.last %}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls[0].function | tojson }}</s>
{%- elif m.role == "tool" %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]
{%- else %} {{ m.content }}</s>{% endif %}{% endfor %}"""
# whether a turn begins with an empty thought is for the system's message to say
SMOL = QWEN25.replace("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", """\
{%- if add_generation_prompt %}<|im_start|>assistant
{% if messages[0].role == "system" and "/no_think" in messages[0].content %}<think>

</think>
{% endif %}{% endif %}""")  # fmt: skip
# a turn begins in a thought
THINKING = QWEN25.removesuffix("{% endif %}") + "<think>\n{% endif %}"
# a conversation that is over ends with one more token
PHI3 = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}<|endoftext|>{% endif %}"""
MARKS = {
    "qwen": (
        *("<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
        *("<|endoftext|>", "<tool_response>", "</tool_response>"),
    ),
    "llama": (
        *("<|eot_id|>", "<|eom_id|>", "<|begin_of_text|>", "<|python_tag|>"),
        *("<|start_header_id|>", "<|end_header_id|>"),
    ),
    "mistral": (
        *("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
    "phi": ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
}


def of_bytes(template: str | None) -> Tokenizer:
    """A token is a byte, or a mark of the template's family; those at an end of a turn stop."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Fast(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    families = {LLAMA31: "llama", MISTRAL: "mistral", PHI3: "phi"}
    end, *others = MARKS[families.get(template or "", "qwen")]
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, additional_special_tokens=others
    )
    made.chat_template = template
    stops = [made.get_vocab()[mark] for mark in ("<|eom_id|>", "<|end|>") if mark in others]
    return Tokenizer(made, stops, chat=True)
