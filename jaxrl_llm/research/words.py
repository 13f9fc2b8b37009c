"""Counts words of reasoning, and sorts tokens into chatter, reasoning and answer."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.research.statistics import correlation, mean

THOUGHT_ENDS = "</think>"

ENGLISH = {  # six categories after arXiv:2505.12929, with inflections
    "analysis": r"analy[sz](?:e|es|ed|ing)|consider(?:s|ed|ing)?|look(?:s|ed|ing)? into|check(?:s|ed|ing)?",
    "statement": r"mention(?:s|ed|ing)?|stat(?:e|es|ed|ing)|claim(?:s|ed|ing)?|say(?:s|ing)?|said",
    "causal indicator": r"since|because|due to|given that",
    "conclusion indicator": r"so|thus|hence|as a result|consequently|therefore",
    "assumption": r"assum(?:e|es|ed|ing)|assumptions?|suppos(?:e|es|ed|ing)",
    "assertion": r"must be|definite(?:ly)?",
}
TINY = {  # the same for the vocabulary of the tiny Knights and Knaves
    "analysis": "no",
    "statement": "true|false",
    "conclusion indicator": "yes",
    "assumption": "knight|knave",
}


def categories(vocabulary: Sequence[str]) -> Mapping[str, str]:
    """The patterns for a vocabulary of words: English if it is empty, none if none fit it."""
    if not vocabulary:
        return ENGLISH
    known = set(vocabulary)
    tiny = {name: pattern for name, pattern in TINY.items() if known >= set(pattern.split("|"))}
    return tiny if len(tiny) == len(TINY) else {}


def count(texts: Sequence[str], patterns: Mapping[str, str]) -> dict[str, list[int]]:
    """Words of each category in each text before `</think>`, or in all of it if there is none."""
    thoughts = [text.partition(THOUGHT_ENDS)[0] for text in texts]
    found = {name: re.compile(rf"\b(?:{p})\b", re.IGNORECASE) for name, p in patterns.items()}
    return {name: [len(p.findall(text)) for text in thoughts] for name, p in found.items()}


def frequencies(
    texts: Sequence[str], rewards: Sequence[float], patterns: Mapping[str, str]
) -> list[dict]:
    """A record for each category: words per response, share with any, correlation with reward."""
    return [
        {
            "name": name,
            "a_response": sum(counts) / max(len(counts), 1),
            "responses_with_any": sum(map(bool, counts)) / max(len(counts), 1),
            "reward_with_any": mean(np.asarray(rewards)[np.asarray(counts) > 0]),
            "reward_without": mean(np.asarray(rewards)[np.asarray(counts) == 0]),
            "correlation_with_reward": correlation(counts, rewards),
        }
        for name, counts in count(texts, patterns).items()
    ]


def group(pieces: Sequence[str], fillers: frozenset[str]) -> list[str]:
    """For each token: 'chatter' (a filler), 'answer' (from `</think>` on) or 'reasoning'."""
    groups, text = [], ""
    for piece in pieces:
        text += piece
        thought = "chatter" if piece.strip() in fillers else "reasoning"
        groups.append("answer" if THOUGHT_ENDS in text else thought)
    return groups
