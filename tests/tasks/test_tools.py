"""Tools: what a model is told, what of its turns is a call, and that the tokens of results are the template's."""

import asyncio
import json
import re
import time
from collections import Counter
from types import SimpleNamespace
from typing import Literal

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import imitate
from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.models import tokenizer
from jaxrl_llm.tasks.python import python
from jaxrl_llm.tasks.task import (
    Demonstrator,
    Episodes,
    Interactive,
    Reward,
    RewardSettings,
    TeacherPrompter,
    check_members,
)
from jaxrl_llm.tasks.tools import Toolbox, hermes, llama, words
from tests.reference import peer
from tests.tasks import templates


def add(a: int, b: int = 1) -> int:
    """The sum of two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def mix(x: float, how: Literal["up", "down"], many: list[int], sure: bool = False) -> str:
    """Says what it was given.

    Args:
        x: A number.
        how: A direction.
        many: Numbers.
        sure: Whether.
    """
    return f"{x!r} {how} {many} {sure}"


def shout(text: str) -> str:
    """Repeats a text.

    Args:
        text: Any.
    """
    return text.upper()


def plus(numbers: str) -> int:
    """The sum of numbers.

    Args:
        numbers: Any.
    """
    return sum(map(int, numbers.split()))


TOOLS = Toolbox([add, mix, shout])


@pytest.mark.parametrize(
    ("form", "turn", "calls"),
    [
        (hermes, "5", []),
        (
            hermes,
            'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            [("add", {"a": 1})],
        ),
        (
            hermes,
            '<tool_call>{"name": "f"}</tool_call>and<tool_call>{"name": "g", "arguments": {}}',
            [("f", {}), ("g", {})],
        ),
        (hermes, '<think><tool_call>{"name": "f"}</tool_call></think> 5', []),
        (hermes, '<think><tool_call>{"name": "f"}</tool_call>', []),
        (hermes, '5<think><tool_call>{"name": "f"}</tool_call></think>', []),
        *(
            (
                hermes,
                f'<think>a</think><tool_call>{{"name": "f", "arguments": {{"x": "{mark}"}}}}'
                '</tool_call><tool_call>{"name": "g"}</tool_call>',
                [("f", {"x": mark}), ("g", {})],
            )
            for mark in ("</think>", "</tool_call>", "<think>", "<tool_call>")
        ),
        (hermes, '<tool_call>{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        (llama, '{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
        (llama, "5", []),
        (llama, "{5}", []),
        (llama, ' {"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        (llama, '<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
        (words, "3 + 4", []),
        (words, "add 3 4 ; shout ; 5", [("add", "3 4"), ("shout", "")]),
    ],
)
def test_calls_are_read_from_a_turn(form, turn, calls):
    assert form(turn) == calls


@pytest.mark.parametrize(
    ("form", "turn", "wrong"),
    [
        (hermes, "<tool_call>add(1)</tool_call>", "no JSON"),
        (hermes, '<tool_call>{"name": "f"} so</tool_call>', "no JSON"),
        (hermes, '<tool_call>{"name": "f</tool_call> 5', "no JSON"),
        (hermes, "<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON"),
        (hermes, "<tool_call>[1]</tool_call>", "a call is"),
        (hermes, '<tool_call>{"name": 1}</tool_call>', "a call is"),
        (hermes, '<tool_call>{"name": "f", "arguments": "a"}</tool_call>', "a call is"),
        (llama, '{"name": "add", "parameters": {"a": 1}} so', "no JSON"),
        (llama, "<|python_tag|>add(1)", "no JSON"),
        (llama, '{"name": "add", "parameters": [1]}', '"parameters"'),
    ],
)
def test_a_call_that_cannot_be_read_says_why(form, turn, wrong):
    [found] = form(turn)
    assert wrong in found
    text, fine = TOOLS.answer(found)
    assert text.startswith("error: ")
    assert not fine


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (("add", {"a": 1, "b": 2}), "3"),
        (("add", {"a": 1}), "2"),
        (("mix", {"x": 1, "how": "up", "many": [1], "sure": True}), "1 up [1] True"),
        (("shout", "a b c"), "A B C"),
    ],
)
def test_a_call_is_answered(call, result):
    assert TOOLS.answer(call) == (result, True)


def many(
    any_of: int | str | None = None,
    both: list[int] | dict[str, int] = [],  # noqa: B006
    kinds: dict = {},  # noqa: B006
    one: Literal[1, 2] | None = 1,
    pair: tuple[int, str] = (1, "a"),
) -> str:
    """Says what it was given.

    Args:
        any_of: A.
        both: B.
        kinds: C.
        one: D.
        pair: E.
    """
    return json.dumps([any_of, both, kinds, one, pair])


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"any_of": 1}, None),
        ({"any_of": "a"}, None),
        ({"any_of": None}, None),
        ({"any_of": 1.5}, "any_of"),
        ({"both": [1]}, None),
        ({"both": {"a": 1}}, None),
        ({"both": ["a"]}, "both"),
        ({"both": {"a": "b"}}, "both"),
        ({"kinds": {"a": ["b"]}}, None),
        ({"kinds": []}, "kinds"),
        ({"one": None}, None),
        ({"one": 1}, None),
        ({"one": 1.0}, "one"),
        ({"one": True}, "one"),
        ({"pair": [2, "b"]}, None),
        ({"pair": ["b", 2]}, "pair"),
        ({"pair": [2]}, "pair"),
    ],
)
def test_types_are_those_that_the_model_is_told(given, wrong):
    text, fine = Toolbox([many]).answer(("many", given))
    assert fine == (wrong is None)
    if wrong:
        assert re.match(f"error: TypeError: {wrong} must be", text)
    else:
        heard = dict(zip(many.__annotations__, json.loads(text), strict=False))
        assert heard | given == heard


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (("sub", {}), "ValueError: no tool 'sub': there is add, mix, shout"),
        (("add", {}), "TypeError: missing a required argument: 'a'"),
        (("add", {"a": 1, "c": 2}), "TypeError: got an unexpected keyword argument 'c'"),
        (("add", {"a": "1"}), "a must be .*integer"),
        (("add", {"a": 1.5}), "a must be .*integer"),
        (("add", {"a": True}), "a must be .*integer"),
        (("add", {"a": None}), "a must be .*integer"),
        (("mix", {"x": 1, "how": "left", "many": []}), "how must be .*up.*down"),
        (("mix", {"x": 1, "how": "up", "many": ["a"]}), "many must be .*array"),
        (("mix", {"x": 1, "how": "up", "many": 1}), "many must be .*array"),
        (("mix", {"x": "1", "how": "up", "many": []}), "x must be .*number"),
        (("add", "1"), "a must be .*integer"),
    ],
)
def test_a_wrong_call_says_why(call, wrong):
    text, fine = TOOLS.answer(call)
    assert not fine
    assert re.match("error: .*" + wrong, text), text


def failing(how: str) -> str:
    """Fails.

    Args:
        how: In which way.
    """
    if how == "hangs":
        time.sleep(3600)
    if how == "exits":
        raise SystemExit(0)
    if how == "tells":
        raise UserError("the index is not there")
    return {"a": object()}[how]  # pyright: ignore


def test_a_tool_that_fails_says_how():
    tools = Toolbox([failing], seconds=1.0)
    says = lambda how: tools.answer(("failing", {"how": how}))
    assert says("x") == ("error: KeyError: 'x'", False)
    assert says("exits") == ("error: SystemExit: 0", False)
    assert says("hangs") == ("error: TimeoutError: no result in 1 s", False)
    assert "object object" in says("a")[0]
    with pytest.raises(UserError, match="the index is not there"):
        says("tells")


def test_half_a_character_is_a_question_mark():
    """JSON can write one, and no tokenizer can."""
    [call] = hermes('<tool_call>{"name": "shout", "arguments": {"text": "a\\ud800"}}</tool_call>')
    assert TOOLS.answer(call) == ("A?", True)


def test_a_long_result_is_cut():
    text, fine = Toolbox([shout], characters=10).answer(("shout", {"text": "ab" * 10}))
    assert (text, fine) == ("ABABABABAB... (10 more characters)", True)


def undescribed(a: int) -> int:
    return a


def untyped(a) -> int:
    """A tool.

    Args:
        a: What?
    """
    return a


def gathering(a: int, **rest: int) -> int:
    """A tool.

    Args:
        a: One.
        rest: Others.
    """
    return a


def by_place(a: int, /) -> int:
    """A tool.

    Args:
        a: One.
    """
    return a


@pytest.mark.parametrize(
    ("functions", "wrong"),
    [
        ([gathering], r"gathering\(\): a model gives arguments by name"),
        ([by_place], r"by_place\(\): a model gives arguments by name"),
        ([undescribed], "undescribed .*no docstring"),
        ([untyped], "type hint in function untyped"),
        ([add, add], "two functions have one name"),
    ],
)
def test_a_function_that_is_not_described_is_refused(functions, wrong):
    with pytest.raises(UserError, match=wrong):
        Toolbox(functions)
    with pytest.raises(UserError, match="calls = 0 must be at least 1"):
        Toolbox([add], calls=0)


# Templates.

RESULT = 'He said: "3"\n<|im_end|><|eot_id|> </tool_call> \u00e9'
QWEN_RESULT = RESULT.replace("<|im", "< |im").replace("</tool_call>", "< /tool_call>")
LLAMA_RESULT = json.dumps(RESULT.replace("<|eot", "< |eot"), ensure_ascii=False)
QWEN_FOLLOWS = (
    "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)
LLAMA_HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
FORMATS = {
    "Qwen2.5": (templates.QWEN25, hermes, QWEN_FOLLOWS.format(QWEN_RESULT)),
    "Qwen3": (templates.QWEN3, hermes, QWEN_FOLLOWS.format(QWEN_RESULT)),
    "Llama 3.1": (
        templates.LLAMA31,
        llama,
        f"{LLAMA_HEAD.format('ipython')}{LLAMA_RESULT}<|eot_id|>"
        f'{LLAMA_HEAD.format("ipython")}"4"<|eot_id|>{LLAMA_HEAD.format("assistant")}',
    ),
    "no tools": (templates.PLAIN, hermes, QWEN_FOLLOWS.format(QWEN_RESULT)),
    "tools told, calls unknown": (
        templates.MISTRAL,
        hermes,
        f"[INST] <tool_response>\n{RESULT}\n</tool_response>\n<tool_response>\n4\n</tool_response>[/INST]",
    ),
    "one more at the end": (
        templates.PHI3,
        hermes,
        f"\n<|user|>\n<tool_response>\n{RESULT}\n</tool_response>\n"
        "<tool_response>\n4\n</tool_response><|end|>\n<|assistant|>\n",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_results_are_the_tokens_that_the_template_adds(name):
    """Their marks are tokens, those within a result are none; and the family's calls are read."""
    template, form, follows = FORMATS[name]
    made = templates.of_bytes(template)
    assert made.decode(TOOLS.replied(made, [RESULT, "4"])) == follows
    assert TOOLS.replied(made, [RESULT, "4"]) == made.encode(follows)
    turn = {
        hermes: '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        llama: '{"name": "f", "parameters": {}}',
    }[form]
    assert TOOLS.read(made, turn) == [("f", {})]
    assert Toolbox([add], form=words).read(made, "add 1 ;") == [("add", "1")]


@pytest.mark.parametrize("name", ["Qwen2.5", "Llama 3.1"])
def test_prompt_turn_and_results_are_the_whole_conversation(name):
    made = templates.of_bytes(FORMATS[name][0])
    tools = [*TOOLS.schemas.values()]
    asked = {"role": "user", "content": "1 + 2?"}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "2"}
    whole = made.turns([asked, turn, result], tools=tools, add_generation_prompt=True)
    prompt = Toolbox(TOOLS.functions).for_task(Sums()).prompt((1, 2))
    before, after = made.prompt(prompt), TOOLS.replied(made, ["2"])
    assert whole[: len(before)] == before
    assert whole[len(whole) - len(after) :] == after
    sampled = whole[len(before) : len(whole) - len(after)]
    assert sampled[-1] == made.eos
    assert TOOLS.read(made, made.decode(sampled)) == [("add", {"a": 1})]


class Sums:
    name = "sums"
    train, test = [(1, 2), (3, 4)], [(5, 6)]

    def prompt(self, example):
        return "{} + {}?".format(*example)

    def reward(self, example, response):
        right = response.endswith(str(sum(example)))
        return Reward(float(right), right, {"length": len(response)})


class Polite(Sums):
    def prompt(self, example):
        return [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": Sums.prompt(self, example)},
        ]

    def demonstration(self, example):
        return str(sum(example))


def test_the_prompt_names_the_tools():
    described = json.dumps(TOOLS.schemas["add"]["function"]["description"])
    for template in (templates.QWEN25, templates.LLAMA31, templates.PLAIN):
        made = templates.of_bytes(template)
        for task in (Sums(), Polite()):
            text = made.decode(made.prompt(TOOLS.for_task(task).prompt((1, 2))))
            assert described in text
            assert "1 + 2?" in text
            assert ("Be kind." in text) == isinstance(task, Polite)
    prompt = TOOLS.for_task(Polite()).prompt((1, 2))
    assert prompt == tuple(Polite().prompt((1, 2)))
    assert made.decode(made.prompt(prompt)).count("<|im_start|>system") == 1
    bare = tokenizer.of_words(["1", "+", "2?", "2"])
    assert bare.prompt(TOOLS.for_task(Sums()).prompt((1, 2))) == bare.encode("1 + 2?")


@pytest.mark.parametrize("form", [None, hermes, llama, lambda turn: []])
@pytest.mark.parametrize("template", [templates.QWEN25, templates.PLAIN, templates.MISTRAL])
def test_the_prompt_names_the_tools_whoever_reads_the_calls(template, form):
    """How to call them it says where calls are read as it says."""
    made, tools = templates.of_bytes(template), Toolbox([add], form=form)
    text = made.decode(made.prompt(tools.for_task(Sums()).prompt((1, 2))))
    assert "The sum of two numbers" in text
    assert text.count("The sum of two numbers") == 1
    told = template == templates.PLAIN or (template, form) == (templates.MISTRAL, None)
    assert ("To call one, write" in text) == (told and form in (None, hermes))


def test_the_turn_after_a_call_begins_as_the_first_one():
    """Whatever the template makes of the system's message."""

    class Brief(Polite):
        def prompt(self, example):
            system, user = Polite.prompt(self, example)
            return [system | {"content": "/no_think"}, user]

    made, tools = templates.of_bytes(templates.SMOL), Toolbox([add])
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    for task, begins in ((Brief(), "assistant\n<think>\n\n</think>\n"), (Polite(), "assistant\n")):
        made_by = tools.for_task(task)
        given, _ = made_by.environment((1, 2), made).step([*made.encode(call), made.eos])
        for tokens in (made.prompt(made_by.prompt((1, 2))), given):
            assert made.decode(tokens).endswith("<|im_start|>" + begins)


def test_a_call_in_a_thought_that_the_prompt_opened_is_none():
    made, task = templates.of_bytes(templates.THINKING), Toolbox([add]).for_task(Sums())
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    for turn, calls in (
        (f"{call}", 0),
        (f"{call}</think>3", 0),
        (f"so </think>{call}", 1),
        (f"{call}</think>{call}", 1),
    ):
        turns = task.environment((1, 2), made)
        for count in (calls, 2 * calls):  # the turn that follows begins in a thought as well
            _, reward = turns.step([*made.encode(turn), made.eos])
            assert reward.fields["tool_calls"] == count


def test_results_hold_no_marks_where_there_is_no_template():
    made = templates.of_bytes(None)
    marks = {made.encode(mark)[0] for mark in made.marks}
    tokens = TOOLS.replied(made, [f"a{''.join(made.marks)}"])
    assert not marks & {*tokens}
    assert made.decode(tokens).replace(" ", "") == f"a{''.join(made.marks)}"


def test_an_added_character_is_no_mark():
    """As DeepSeek's tokenizers have them: letters that the vocabulary lacks."""
    made = templates.of_bytes(templates.QWEN25)
    made._inner.add_tokens(["\u4e2d"])
    made = tokenizer.Tokenizer(made._inner, made.stops, chat=made.chats)
    assert "\na\u4e2db\n" in made.decode(TOOLS.replied(made, ["a\u4e2db"]))


def test_spaces_of_a_result_are_kept():
    """Some vocabularies have tokens of several spaces."""
    made = templates.of_bytes(templates.QWEN25)
    made._inner.add_tokens(["    ", "<b>"])
    made = tokenizer.Tokenizer(made._inner, made.stops, chat=made.chats)
    assert "\n    return < b>\n" in made.decode(TOOLS.replied(made, ["    return <b>"]))


def test_a_template_whose_turns_do_not_end_is_refused():
    made = templates.of_bytes(templates.PLAIN.replace("<|im_end|>", "</s>"))
    with pytest.raises(UserError, match="ends a turn with no token that ends a response"):
        TOOLS.replied(made, ["2"])


@pytest.mark.parametrize(
    ("template", "eos", "ends", "want"),
    [
        (templates.QWEN25, "<|endoftext|>", ("<|im_end|>",), "<|im_end|>"),
        (templates.QWEN25, "<|im_end|>", (), "<|im_end|>"),
        (templates.QWEN25, "<|endoftext|>", (), "<|endoftext|>"),  # what ends is no stop
        (templates.LLAMA31, "<|eom_id|>", ("<|eot_id|>",), "<|eot_id|>"),
        (templates.PHI3, "<|endoftext|>", ("<|end|>",), "<|end|>"),
    ],
)
def test_a_demonstrated_turn_ends_as_the_template_ends_it(template, eos, ends, want):
    inner = templates.of_bytes(template)._inner
    inner.eos_token = eos
    made = tokenizer.Tokenizer(inner, [inner.get_vocab()[end] for end in ends], chat=True)
    task, want = TOOLS.for_task(Sums()), inner.get_vocab()[want]
    [played] = TokenTask(task, made).replay([(1, 2)], ["3"])
    [shown] = imitate.demonstrations(TokenTask(Sums(), made), lambda _: "3", 9, [(1, 2)])
    assert played.tokens == shown.tokens == [*made.encode("3"), want]
    plain = TokenTask(Sums(), tokenizer.Tokenizer(inner, made.stops))
    assert plain.turn(plain.ask((1, 2)), "3") == [*made.encode("3"), made.eos]


@pytest.mark.parametrize(("task", "by_whom"), [(Sums(), 1), (TOOLS.for_task(Sums()), 2)])
def test_a_demonstration_asks_for_its_prompt_once(task, by_whom, monkeypatch):
    """And once more by the environment, where there is one."""
    asked, prompt = [], Sums.prompt
    monkeypatch.setattr(Sums, "prompt", lambda *args: asked.append(args[1]) or prompt(*args))
    words = templates.of_bytes(templates.QWEN25)
    imitate.demonstrations(TokenTask(task, words), lambda _: "3", 9, [(1, 2), (3, 4)])
    assert Counter(asked) == {(1, 2): by_whom, (3, 4): by_whom}


def test_a_real_tokenizer_without_tools_in_its_template():
    """SmolLM2: it is told in the system's message, and results are what the user says."""
    folder = peer.needed("JAXRL_REAL_MODEL", "a Llama folder")
    made = tokenizer.load(peer.pathlib.Path(folder), chat=True)
    prompt = made.decode(made.prompt(TOOLS.for_task(Sums()).prompt((1, 2))))
    assert prompt.startswith("<|im_start|>system\nYou can call functions")
    assert prompt.endswith(
        "<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    follows = "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    tokens = TOOLS.replied(made, ["7"])
    assert made.decode(tokens) == follows
    said = [*made.encode('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'), made.eos]
    given, reward = TOOLS.for_task(Sums()).environment((1, 2), made).step(said)
    assert made.decode(given) == follows.replace("7", "2")
    assert reward.fields == {"length": 61, "tool_used": 1, "tool_calls": 1, "tool_errors": 0}
    # what was said is kept as it is, so the whole is the template's too
    whole = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": made.decode(said)},
        {"role": "user", "content": "<tool_response>\n2\n</tool_response>"},
    ]
    task = TOOLS.for_task(Sums())
    assert [*made.prompt(task.prompt((1, 2))), *said, *given] == TOOLS.prompt_ids(made, whole)


# Episodes.

WORDS = tokenizer.of_words(
    ["1", "2", "3", "plus", "shout", "error", ";", "so", "+", "2?", "4?", "6?"]
)


def played(turns, task=None, **how):
    task = TokenTask(Toolbox([plus, shout], **how).for_task(task or Sums()), WORDS)
    [one] = task.replay([(1, 2)], [turns])
    return WORDS.decode(one.tokens), one.reward


def test_an_episode_of_calls_ends_with_a_turn_without_one():
    text, reward = played(["plus 1 2 ; plus 1 1 ;", "so 3", "plus 1 ;"])
    assert text == "plus 1 2 ; plus 1 1 ; <eos> 3 2 so 3"
    assert (reward.score, reward.correct) == (1.0, True)
    used = {"tool_used": 1, "tool_calls": 2, "tool_errors": 0}
    assert reward.fields == {"length": 4} | used
    assert played("3")[1].fields == {"length": 1} | dict.fromkeys(used, 0)


def test_a_wrong_call_is_answered_and_the_episode_goes_on():
    """Also one whose result is no word of the vocabulary."""
    for wrong in ("so 1 ;", "plus so ;", "plus 3 3 ;", "shout so ;", ";"):
        text, reward = played([wrong, "3"])
        assert text == f"{wrong} <eos> error 3"
        assert reward.correct
        assert reward.fields["tool_errors"] == (wrong not in ("plus 3 3 ;", "shout so ;"))


def test_more_calls_than_allowed_are_not_made():
    tools = Toolbox([add], calls=2)
    made = templates.of_bytes(templates.QWEN25)
    turn = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 3
    given, reward = (
        tools.for_task(Sums()).environment((1, 2), made).step([*made.encode(turn), made.eos])
    )
    said = re.findall("<tool_response>\n(.*)\n", made.decode(given))
    assert said == ["2", "2", "error: only 2 calls of a turn are made"]
    assert (reward.fields["tool_calls"], reward.fields["tool_errors"]) == (3, 1)


def test_the_reward_sees_the_last_turn_or_all():
    for whole, seen in ((False, "so 3"), (True, "plus 1 2 ;\nso 3")):
        said = []

        class Noting(Sums):
            def reward(self, example, response, said=said):
                said.append(response)
                return Reward(0.0, False)

        task = TokenTask(Toolbox([plus]).for_task(Noting(), whole=whole), WORDS)
        task.replay([(1, 2)], [["plus 1 2 ;", "so 3"]])
        assert said == ["plus 1 2 ;", seen]


def test_a_turn_that_was_cut_calls_nothing():
    called = []

    def note(text: str) -> str:
        """Notes it.

        Args:
            text: Any.
        """
        called.append(text)
        return text

    turns = Toolbox([note]).for_task(Sums()).environment((1, 2), WORDS)
    given, reward = turns.step(WORDS.encode("1 ;"))
    assert given is None
    assert (called, reward.fields["tool_used"]) == ([], 0)


def test_a_task_with_tools_is_a_task():
    task = TOOLS.for_task(Polite())
    check_members(task, "task")
    assert isinstance(task, Interactive)
    assert isinstance(task, Demonstrator)
    assert task.demonstration((1, 2)) == "3"
    assert not isinstance(TOOLS.for_task(Sums()), Demonstrator | TeacherPrompter)
    told = Polite()
    told.teacher_prompt = lambda example: "3"
    assert TOOLS.for_task(told).teacher_prompt((1, 2)).token_ids(WORDS) == WORDS.prompt("3")
    told.teacher_prompt = lambda example: None
    assert TOOLS.for_task(told).teacher_prompt((1, 2)) is None
    assert (task.name, task.test) == ("sums", [(5, 6)])


async def later(number: int) -> int:
    """Waits for the others.

    Args:
        number: Returned.
    """
    MEETING.append(number)
    while len(MEETING) < 40:
        await asyncio.sleep(0.01)
    if number < 0:
        raise ValueError(number)
    return number


async def never(number: int) -> int:
    """Waits for ever.

    Args:
        number: Unused.
    """
    await asyncio.sleep(3600)
    return number


async def leaves(number: int) -> int:
    """Leaves.

    Args:
        number: Unused.
    """
    raise SystemExit(number)


async def cancelled(number: int) -> int:
    """Is cancelled.

    Args:
        number: Unused.
    """
    raise asyncio.CancelledError


MEETING = []


def test_coroutines_that_exit_or_are_cancelled_are_answered_and_rewards_keep_their_threads():
    at_once, most = [], []

    class Slow(Sums):
        def reward(self, example, response):
            at_once.append(1)
            most.append(len(at_once))
            time.sleep(0.05)
            at_once.pop()
            return super().reward(example, response)

    tools = Toolbox([leaves, cancelled])
    made, task = templates.of_bytes(templates.QWEN25), tools.for_task(Slow())
    turn = '<tool_call>{{"name": "{}", "arguments": {{"number": 3}}}}</tool_call>'.format
    tokens = [*made.encode(turn("leaves") + turn("cancelled")), made.eos]
    with Episodes(task, made, [(1, 2)] * 4, RewardSettings(threads=1)) as episodes:
        heard = [reply.result(120)[0] for reply in [episodes(i, tokens) for i in range(4)]]
    for one in heard:
        results = re.findall("<tool_response>\n(.*)\n", made.decode(one))
        assert results == ["error: SystemExit: 3", "error: RuntimeError: it was cancelled"]
    assert max(most) == 1


def test_coroutines_hold_no_thread():
    """Forty calls of twenty episodes wait for one another, beside one thread; others are answered meanwhile."""
    MEETING.clear()
    patient, hasty = (
        Toolbox([later, never, add], seconds=seconds).for_task(Sums()) for seconds in (120, 3)
    )
    made, task = templates.of_bytes(templates.QWEN25), SimpleNamespace()
    task.environment = lambda last, words: [patient, hasty][last].environment((1, 2), words)
    turn = '<tool_call>{{"name": "{}", "arguments": {{"{}": {}}}}}</tool_call>'.format
    with Episodes(task, made, [False] * 20 + [True]) as episodes:
        said = [turn("later", "number", i) + turn("later", "number", -1 - i) for i in range(20)]
        said += [turn("add", "a", 1) + turn("never", "number", 1) + turn("later", "a", 1)]
        replies = [episodes(i, [*made.encode(one), made.eos]) for i, one in enumerate(said)]
        heard = [made.decode(reply.result()[0]) for reply in replies]
    results = [re.findall("<tool_response>\n(.*)\n", one) for one in heard]
    assert results[:20] == [[str(i), f"error: ValueError: {-1 - i}"] for i in range(20)]
    assert results[20][:2] == ["2", "error: TimeoutError: no result in 3 s"]
    assert results[20][2].startswith("error: TypeError: ")
    assert episodes.rewards[20].fields["tool_errors"] == 2


def test_a_tool_with_a_limit_of_its_own_has_no_other():
    """One that waits for its turn would use it up."""

    def slow(text: str) -> str:
        """Takes its time.

        Args:
            text: Any.
        """
        time.sleep(1.0)
        return text

    tools = Toolbox([slow], seconds=0.05)
    assert tools.answer(("slow", {"text": "a"})) == (
        "error: TimeoutError: no result in 0.05 s",
        False,
    )
    vars(slow)["limits_itself"] = True
    assert tools.answer(("slow", {"text": "a"})) == ("a", True)
    assert vars(python)["limits_itself"]


def test_a_late_tool_is_left_behind_and_others_go_on():
    tools = Toolbox([failing, add], seconds=1.0)
    assert not tools.answer(("failing", {"how": "hangs"}))[1]
    assert tools.answer(("add", {"a": 1})) == ("2", True)
