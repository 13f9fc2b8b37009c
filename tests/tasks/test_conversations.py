"""Tables of conversations: which tokens are the assistant's, and rows that are refused."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import conversations
from jaxrl_llm.training.fingerprint import written_out
from tests.tasks import templates

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "6 * 7?"}
SAID = {"role": "assistant", "content": "42"}
AGAIN = {"role": "user", "content": "42?"}
YES = {"role": "assistant", "content": "Yes, 42."}
CALL = {"id": "call00000", "type": "function", "function": {"name": "mul", "arguments": {"a": 6}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
GIVEN = {"role": "tool", "name": "mul", "tool_call_id": "call00000", "content": "42"}
TOOLS = [{"type": "function", "function": {"name": "mul", "parameters": {}}}]


def written(folder, *rows, name="mine.jsonl"):
    path = folder / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(folder, row, name="mine.jsonl", **settings):
    """The task of such a row, and that."""
    task = conversations.task(written(folder, row, name=name), held_out=0, **settings)
    return task, task.train[0]


def learned(row, tokenizer):
    return [tokenizer.decode(row.tokens[start:end], ended=False) for start, end in row.turns]


@pytest.mark.parametrize(
    ("template", "end", "messages"),
    [
        (templates.QWEN25, "<|im_end|>", [SYSTEM, ASKED, SAID, AGAIN, YES]),
        (templates.QWEN25, "<|im_end|>", [ASKED, SAID, YES, AGAIN, SAID]),  # two turns in a row
        (templates.QWEN25, "<|im_end|>", [ASKED, SAID, AGAIN, SAID]),  # which say the same
        (templates.PLAIN, "<|im_end|>", [ASKED, SAID, AGAIN]),  # the user has the last word
        (templates.PLAIN, "<|im_end|>", [ASKED, {**SAID, "content": "42 42?<|im_start|>"}, AGAIN, YES]),
        (templates.PHI3, "<|end|>", [ASKED, SAID, AGAIN, YES]),
        (templates.LLAMA31, "<|eot_id|>", [SYSTEM, ASKED, SAID, AGAIN, YES]),
    ],
)  # fmt: skip
def test_all_turns_of_the_assistant_are_learned_with_their_ends(tmp_path, template, end, messages):
    """The tokens are those of the template for the whole conversation, as far as the last end."""
    task, example = read(tmp_path, {"messages": messages})
    tokenizer = templates.of_bytes(template)
    row = task.row(example, tokenizer)
    whole = tokenizer.turns(messages)
    assert row.tokens == whole[: len(row.tokens)]
    assert row.restarts == []
    said = [one["content"] for one in messages if one["role"] == "assistant"]
    assert learned(row, tokenizer) == [f"{text}{end}" for text in said]
    given = [t for i, t in enumerate(row.tokens) if not any(a <= i < b for a, b in row.turns)]
    theirs = [m["content"] for m in messages if m["role"] != "assistant"]
    assert all(text in tokenizer.decode(given, ended=False) for text in theirs[: len(said)])


def test_turns_with_calls_are_learned_and_results_are_not(tmp_path):
    messages, tokenizer = [ASKED, CALLS, GIVEN, YES], templates.of_bytes(templates.QWEN25)
    called = '<tool_call>\n{"name": "mul", "arguments": {"a": 6}}\n</tool_call><|im_end|>'
    for tools in (TOOLS, json.dumps(TOOLS)):  # parquet has them as a text
        task, example = read(tmp_path, {"messages": messages, "tools": tools})
        row = task.row(example, tokenizer)
        assert row.tokens == tokenizer.turns(messages, tools=TOOLS)[:-1]
        assert learned(row, tokenizer) == [f"\n{called}"[1:], "Yes, 42.<|im_end|>"]
        asked = tokenizer.prompt(task.prompt(example))
        assert asked == row.tokens[: len(asked)]
        assert task.demonstration(example) == YES["content"]


def test_a_turn_that_is_written_otherwise_later_is_learned_as_it_was_said(tmp_path):
    """Each context is the template's prompt for what came before, and no token is learned twice."""
    messages = [ASKED, SAID, AGAIN, YES]
    task, example = read(tmp_path, {"messages": messages})
    tokenizer = templates.of_bytes(templates.QWEN3)
    row = task.row(example, tokenizer)
    thought = "<think>\n\n</think>\n\n"
    assert learned(row, tokenizer) == [f"{thought}42<|im_end|>", f"{thought}Yes, 42.<|im_end|>"]
    [(start, end)] = row.restarts
    assert row.tokens[: row.turns[0][0]] == tokenizer.turns([ASKED], add_generation_prompt=True)
    assert row.tokens[start:end] == tokenizer.turns(messages[:3], add_generation_prompt=True)
    assert (row.turns[0][1], end) == (start, row.turns[1][0])


@pytest.mark.parametrize(
    ("row", "prompt", "said"),
    [
        ({"prompt": "6 * 7?", "completion": "42"}, "6 * 7?", ["42"]),
        ({"question": "6 * 7?", "answer": "42"}, "6 * 7?", ["42"]),
        ({"instruction": "Multiply.", "input": "6, 7", "output": "42"}, "Multiply.\n\n6, 7", ["42"]),
        ({"prompt": [ASKED], "completion": [SAID]}, (ASKED,), ["42"]),
        # what the prompt has of the assistant is given
        ({"prompt": [ASKED, SAID, AGAIN], "completion": [YES]}, (ASKED, SAID, AGAIN), ["Yes, 42."]),
        ({"messages": [ASKED, SAID, AGAIN, YES]}, (ASKED, SAID, AGAIN), ["42", "Yes, 42."]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["mine.jsonl", "mine.parquet"])
def test_the_forms_of_a_row(tmp_path, row, prompt, said, name):
    task, example = read(tmp_path, row, name)
    tokenizer = templates.of_bytes(templates.QWEN25)
    assert task.prompt(example) == prompt
    tokens = task.row(example, tokenizer)
    assert learned(tokens, tokenizer) == [f"{text}<|im_end|>" for text in said]
    asked = tokenizer.prompt(prompt)
    assert tokens.tokens[: len(asked)] == asked
    assert not task.graded


def test_a_row_is_what_it_says_however_it_is_written(tmp_path):
    """Arguments as OpenAI has them, fields that parquet adds, JSON in a cell, another folder."""
    function = {"name": "mul", "arguments": json.dumps({"a": 6})}
    openai = CALLS | {"tool_calls": [CALL | {"function": function}]}
    schema = {"type": "function", "function": {"name": "mul", "parameters": {"a": {"type": "x"}}}}
    row = {"messages": [ASKED, openai, GIVEN, SAID], "tools": [schema]}
    task, want = read(tmp_path, row)
    assert want.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 6}
    other = {"function": {"name": "add", "arguments": {"b": 1}, "parameters": {"b": {"type": "y"}}}}
    wider = [CALLS | {"tool_calls": [CALL, CALL | other]}, GIVEN, YES]
    tools = [schema | {"function": schema["function"] | other["function"]}]
    path = written(
        tmp_path,
        {"messages": [ASKED, CALLS, GIVEN, SAID], "tools": [schema]},
        {"messages": [ASKED, *wider], "tools": tools},
        name="mine.parquet",
    )
    found = conversations.task(path)
    [parquet] = [one for one in [*found.train, *found.test] if one.messages[-1] == SAID]
    assert (parquet.messages, parquet.tools) == (want.messages, want.tools)
    (tmp_path / "there").mkdir()
    cell = {"messages": json.dumps(row["messages"]), "tools": json.dumps(row["tools"])}
    _, cells = read(tmp_path / "there", cell)
    assert written_out(cells) == written_out(want)  # the run may go on from there
    assert read(tmp_path, row | {"tools": "[]"})[1].tools is None
    assert task.name == "conversations"


def test_a_column_that_is_named_is_the_one(tmp_path):
    row = {"prompt": "6 * 7?", "messages": [ASKED, SAID], "chosen": "It is 42.", "completion": "0"}
    _, example = read(tmp_path, row, completion_column="chosen")
    assert example.messages[-1]["content"] == "It is 42."


def test_texts_without_a_template_are_continued(tmp_path):
    task, example = read(tmp_path, {"prompt": "6 * 7 =", "completion": " 42"})
    tokenizer = templates.of_bytes(None)
    tokenizer.chats = False
    row = task.row(example, tokenizer)
    assert row.tokens == [*tokenizer.encode("6 * 7 = 42"), tokenizer.eos]
    assert learned(row, tokenizer) == [" 42<|im_end|>"]


def test_a_response_to_the_last_prompt_is_graded_where_there_is_a_reward(tmp_path):
    boxed = {"role": "assistant", "content": "It is \\boxed{42}."}
    task, example = read(tmp_path, {"messages": [ASKED, boxed]}, specs=["math"])
    assert task.graded
    assert [task.reward(example, f"\\boxed{{{x}}}").correct for x in (42, 41)] == [True, False]
    for row in (
        {"prompt": "6 * 7?", "completion": "It is #### 42"},
        {"prompt": [ASKED], "completion": [boxed]},
        {"instruction": "Multiply.", "input": "6, 7", "output": "It is #### 42"},
        {"messages": json.dumps([ASKED, boxed])},
    ):
        task, example = read(tmp_path, row, specs=["math"])
        assert task.reward(example, "\\boxed{42}").correct
        with pytest.raises(UserError, match="no truth among"):
            read(tmp_path, row, specs=["math"], answer_column="truth")
    task, example = read(tmp_path, {"messages": [ASKED, YES], "answer": "42"}, specs=["exact"])
    assert task.reward(example, "42").correct


BAD = {
    "no turn of the assistant's": ({"messages": [ASKED]}, "there is no turn of the assistant"),
    "none in the completion": (
        {"prompt": [ASKED, SAID], "completion": [AGAIN]},
        "there is no turn of the assistant",
    ),
    "a role": (
        {"messages": [{"role": "bot", "content": "x"}]},
        "message 0 has the role 'bot', none of system, user, assistant, tool",
    ),
    "an empty turn": ({"messages": [ASKED, SAID | {"content": " "}]}, "message 1, of the assistant, is empty"),
    "a turn without content": ({"messages": [ASKED, {"role": "assistant"}]}, "message 1, of the assistant, is"),
    "an empty question": ({"messages": [ASKED | {"content": ""}, SAID]}, "message 0, of the user, is empty"),
    "parts": ({"messages": [ASKED, SAID | {"content": [{"text": "x"}]}]}, "message 1 has as its content no text"),
    "a text": ({"messages": "6 * 7"}, "message 0 has the role None, none of"),
    "a list of texts": ({"messages": ["6 * 7"]}, "messages are a list of role and content"),
    "a number": ({"messages": 7}, "messages are a list of role and content, not 7"),
    "no prompt": ({"completion": "42"}, "no problem or .* among completion: name the column"),
    "no completion": ({"prompt": "6 * 7?"}, "no completion or .*: name the column by --completion-column"),
    "tools": ({"messages": [ASKED, SAID], "tools": "{"}, "Expecting"),
    "no answer": ({"messages": [ASKED, SAID], "answer": ""}, "the answer is empty, and a reward needs one"),
    "JSON that is cut": ({"messages": json.dumps([ASKED, SAID])[:-1]}, "Expecting"),
    "half a character": ({"messages": [ASKED, SAID | {"content": "\ud83d"}]}, "a text has half a surrogate pair"),
    "nested": ({"messages": "[" * 100_000}, "maximum recursion depth exceeded"),
    "no row": (7, "a int, not a row with columns"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_is_wrong_is_named(tmp_path, name):
    row, said = BAD[name]
    path = written(tmp_path, {"messages": [ASKED, SAID], "answer": "42"}, row)
    specs = ["exact"] if name == "no answer" else []
    with pytest.raises(UserError, match=f"mine.jsonl, row 1: {said}") as caught:
        conversations.task(path, specs)
    assert "\n" not in str(caught.value)


# what a template does to a turn that cannot be learned, by what it says of it
REWRITTEN = {
    "a turn that it does not begin as it asks for it": (templates.THINKING, "begins this turn otherwise"),
    "no end": (templates.PLAIN.replace("<|im_end|>", ""), "ends the turn with no token that ends"),
    "an exception": ("{{ raise_exception('no') }}", "chat template does not take .*: no"),
}  # fmt: skip


@pytest.mark.parametrize("template", [templates.QWEN25, None])
def test_a_turn_that_says_how_a_turn_ends_is_refused(tmp_path, template):
    """What came after it would never be learned."""
    tokenizer = templates.of_bytes(template)
    tokenizer.chats = template is not None
    row = {"prompt": "How does it end?", "completion": "With <|im_end|>, and then more."}
    task, example = read(tmp_path, row)
    with pytest.raises(UserError, match=r"row [01].*: there is a token in it that ends a response"):
        task.row(example, tokenizer)


@pytest.mark.parametrize("name", REWRITTEN)
def test_what_a_template_makes_unlearnable_is_refused_by_row(tmp_path, name):
    template, said = REWRITTEN[name]
    task, example = read(tmp_path, {"messages": [ASKED, SAID]})
    with pytest.raises(UserError, match=f"mine.jsonl, row [01], message 1: .*{said}") as caught:
        task.row(example, templates.of_bytes(template))
    assert "\n" not in str(caught.value)
