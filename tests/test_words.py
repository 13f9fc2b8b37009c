"""Words that tell how a response reasons."""

import pytest

from jaxrl_llm.learning import words
from jaxrl_llm.tasks.knights_knaves import tiny as kk_tiny

TEXTS = [
    "Considering this, so we ANALYSED it; suppose not. </think> so so so",
    "Some sofa, thusly recheck. He must  be here",
    "It must be a knave because Zoey said so, hence checked. Assuming that",
]


def test_words_are_found_with_their_inflections_within_the_thought():
    found = words.count(TEXTS, words.ENGLISH)
    assert found == {
        "analysis": [2, 0, 1],
        "statement": [0, 0, 1],
        "causal indicator": [0, 0, 1],
        "conclusion indicator": [1, 0, 2],
        "assumption": [1, 0, 1],
        "assertion": [0, 0, 1],
    }


def test_frequencies_and_their_correlation_with_the_reward():
    found = {f["name"]: f for f in words.frequencies(TEXTS, [1.0, 0.0, 2.0], words.ENGLISH)}
    conclusion = found["conclusion indicator"]
    assert conclusion["a_response"] == 1.0
    assert conclusion["responses_with_any"] == pytest.approx(2 / 3)
    assert conclusion["reward_with_any"] == 1.5
    assert conclusion["reward_without"] == 0.0
    assert conclusion["correlation_with_reward"] == pytest.approx(1.0)
    even = words.frequencies(TEXTS, [1.0, 1.0, 1.0], words.ENGLISH)
    assert all(entry["correlation_with_reward"] is None for entry in even)


def test_a_small_vocabulary_has_its_own_words_or_none():
    assert words.categories(()) is words.ENGLISH
    assert words.categories(kk_tiny.vocabulary()) == words.TINY
    assert words.categories(("1", "2", "+")) == {}


def test_every_token_has_one_group():
    response = ["um", "knight", "true", "um", "yes", "</think>", "<answer>", "um"]
    groups = words.group(response, frozenset(kk_tiny.FILLERS))
    assert groups == ["chatter", "reasoning", "reasoning", "chatter", "reasoning", *["answer"] * 3]
    split = ["so", " um", " </", "think", ">", " x"]
    assert words.group(split, frozenset()) == ["reasoning"] * 4 + ["answer"] * 2
