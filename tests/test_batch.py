"""Padding and packing lose nothing and invent nothing."""

import dataclasses
import random
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.batch import Collator
from tests import tiny

HOW = [
    {},
    {"pack": True},
    {"minibatches": 2, "microbatches": 3, "shards": 2},
    {"minibatches": 4, "microbatches": 2, "shards": 4, "pack": True},
]


@pytest.mark.parametrize("how", HOW)
def test_every_response_token_has_one_slot_and_the_column_before_it(how):
    responses = tiny.responses(1, rows=16)
    batch = tiny.collator(**how)(responses)
    inputs, slot = batch.inputs, np.asarray(batch.layout.in_bins)
    used = np.sort(slot[slot >= 0])
    assert np.array_equal(used, np.flatnonzero(np.asarray(batch.layout.in_rows) >= 0))
    columns = inputs.index.shape[-1]
    tokens = inputs.tokens.reshape(-1, inputs.tokens.shape[-1])
    positions = inputs.positions.reshape(tokens.shape)
    for b, one in enumerate(responses):
        prompt, response = one.prompt, one.tokens
        text = list(prompt) + list(response)
        for t, token in enumerate(response):
            row, column = divmod(slot[b, t], columns)
            at = inputs.index.reshape(-1, columns)[row, column]
            assert inputs.target.reshape(-1, columns)[row, column] == token == tokens[row, at + 1]
            assert positions[row, at] == len(prompt) - 1 + t
            start = at - positions[row, at]
            assert tokens[row, start : at + 2].tolist() == text[: len(prompt) + t + 1]
        assert not (slot[b, len(response) :] >= 0).any()
    assert np.array_equal(batch.mask, slot >= 0)


@pytest.mark.parametrize("how", HOW)
def test_the_layout_is_a_bijection(how):
    layout = tiny.collator(**how)(tiny.responses(2, rows=16)).layout
    noise = np.random.default_rng(0).normal(size=layout.in_bins.shape)
    x = jnp.asarray(np.where(layout.in_bins >= 0, noise, 0), jnp.float32)
    assert np.array_equal(layout.to_rows(layout.to_bins(x)), x)


@pytest.mark.parametrize("how", HOW)
def test_mini_batches_are_runs_of_rows(how):
    layout = tiny.collator(**how)(tiny.responses(3, rows=16)).layout
    minibatches = layout.in_rows.shape[0]
    width = layout.in_bins.shape[1]
    for m in range(minibatches):
        rows = layout.in_rows[m][layout.in_rows[m] >= 0] // width
        assert set(rows // (16 // minibatches)) == {m}


def test_packing_shares_rows():
    responses = tiny.trajectories([[1, 2]] * 8, [[3, 4, 5]] * 8)
    batch = tiny.collator(pack=True, microbatches=4)(responses)
    assert batch.inputs.tokens.shape == (1, 4, 2, 22)
    assert batch.inputs.segments.max() == 4
    assert batch.inputs.scored.any((0, 2, 3)).tolist() == [True, False, False, False]


SHARED = {"pack": True, "share_prompts": True}


@pytest.mark.parametrize("how", [{}, {"minibatches": 2, "microbatches": 2, "shards": 2}])
def test_responses_share_their_prompt_and_see_nothing_else(how):
    """From the arrays alone: the tokens that a token sees are those before it in its own sequence."""
    responses = [
        dataclasses.replace(
            one, experts=(np.asarray([*one.prompt, *one.tokens][:-1], np.int16)[:, None, None],)
        )
        for one in tiny.sharing(rows=16)
    ]
    batch = tiny.collator(**SHARED, **how)(responses)
    inputs, slot = batch.inputs, batch.layout.in_bins
    columns, length = inputs.index.shape[-1], inputs.tokens.shape[-1]
    flat = lambda x: np.asarray(x).reshape(-1, length)
    tokens, positions, segments, prompts, experts = map(
        flat, (inputs.tokens, inputs.positions, inputs.segments, inputs.prompts, inputs.experts)
    )
    for b, one in enumerate(responses):
        text = [*one.prompt, *one.tokens]
        for t, token in enumerate(one.tokens):
            row, column = divmod(slot[b, t], columns)
            at = inputs.index.reshape(-1, columns)[row, column]
            assert inputs.target.reshape(-1, columns)[row, column] == token
            visible = (segments[row] == segments[row, at]) | (segments[row] == prompts[row, at])
            seen = np.flatnonzero(visible[: at + 1])
            assert positions[row, seen].tolist() == [*range(len(one.prompt) + t)]
            assert tokens[row, seen].tolist() == text[: len(one.prompt) + t]
            assert experts[row, seen].tolist() == text[: len(one.prompt) + t]
    alone = tiny.collator(pack=True, **how)(responses)
    assert np.count_nonzero(segments) < np.count_nonzero(alone.inputs.segments)


def test_a_bin_has_a_shared_prompt_once():
    responses = tiny.trajectories([[1, 2, 3, 4, 5]] * 6, [[6, 7]] * 6)
    batch = tiny.collator(**SHARED)(responses)
    assert np.count_nonzero(batch.inputs.segments) == 4 + 6 * 3  # just what a bin has room for
    assert batch.inputs.segments.any((0, 1, 3)).tolist() == [True] + [False] * 5
    batch = tiny.collator(**SHARED)([*responses, *tiny.trajectories([[1, 2, 3, 4, 5]], [[6]])])
    assert np.count_nonzero(batch.inputs.segments) == 4 + 6 * 3 + 4 + 2
    with pytest.raises(UserError, match="set pack = True"):
        tiny.collator(share_prompts=True)


def test_a_shared_prompt_takes_no_more_bins_than_each_its_own():
    """Even where responses of other prompts would fill the bins better than its own."""
    rng = random.Random(0)
    lengths = [
        [60, 60, 60, 38, 38, 38],
        *([rng.randint(20, 90) for _ in range(6)] for _ in range(20)),
    ]
    for each in lengths:
        prompts = [[1, 2]] * 6 if each is lengths[0] else [[1, n % 2] for n in range(6)]
        responses = tiny.trajectories(prompts, [[3] * n for n in each])
        plain, shared = (
            Collator(2, 100, pack=True, share_prompts=share, microbatches=6)(responses)
            for share in (False, True)
        )
        bins = [int(x.inputs.segments.any(-1).sum()) for x in (plain, shared)]
        assert bins[1] <= bins[0]


def test_a_row_that_is_not_kept_has_no_tokens():
    responses, keep = tiny.responses(), [True, False] * 4
    for pack in (False, True):
        whole = tiny.collator(pack=pack)(responses)
        batch = tiny.collator(pack=pack)(responses, keep)
        assert (batch.mask == whole.mask & np.asarray(keep)[:, None]).all()
        assert batch.inputs.scored.sum() == batch.mask.sum()
        assert batch.inputs.tokens.shape == whole.inputs.tokens.shape


def test_eos_that_equals_the_padding_token_is_a_token():
    """Masks come from lengths: token 0 at the end of a response keeps its loss and attention."""
    batch = tiny.collator()(tiny.trajectories([[0, 0]], [[0, 5, 0]], [[-1.0, -2.0, -3.0]]))
    assert batch.mask.sum() == 3
    assert batch.sampler_logp[0, :3].tolist() == [-1, -2, -3]


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        (([[1]] * 3, [[2]] * 3), "3 responses do not divide into 2 mini-batches"),
        (([[1] * 9, [1]], [[2], [2]]), "prompt 0 has 9 tokens"),
        (([[1], [1]], [[2], [2] * 15]), "response 1 has 15 tokens, the limit is 1 to 14"),
        (([[1], []], [[2], [2]]), "prompt 1 has 0 tokens"),
        (([[1], [1]], [[2], []]), "response 1 has 0 tokens"),
        (([[1], [1]], [[2], [2, 3]], [[0.0]] * 2), "response 1 has 2 tokens but 1 log-probs"),
    ],
)
def test_bad_responses_are_refused(responses, message):
    with pytest.raises(UserError, match=re.escape(message)):
        tiny.collator(minibatches=2)(tiny.trajectories(*responses))


@pytest.mark.parametrize("pack", [False, True])
def test_without_responses_there_is_no_batch(pack):
    with pytest.raises(UserError, match="there are no responses to learn from"):
        Collator(2, 3, pack=pack)([])


def test_responses_of_a_bin_are_numbered_apart():
    batch = tiny.collator(pack=True)(tiny.trajectories([[1, 2]] * 8, [[3, 4, 5]] * 8))
    layout, width = batch.layout, batch.layout.in_bins.shape[1]
    rows = np.where(layout.in_rows >= 0, layout.in_rows // width, -1)
    columns = rows.shape[-1]
    for row, number in zip(
        rows.reshape(-1, columns), layout.response.reshape(-1, columns), strict=True
    ):
        pairs = {(int(r), int(n)) for r, n in zip(row, number, strict=True)}
        assert len({r for r, _ in pairs}) == len({n for _, n in pairs}) == len(pairs)
        assert all((r == -1) == (n == 0) for r, n in pairs)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("pack", [False, True])
def test_slices_divide_over_shards(shards, pack):
    batch = tiny.collator(microbatches=3, shards=shards, pack=pack)(tiny.responses(rows=16))
    assert batch.inputs.tokens.shape[2] % shards == 0


def test_a_bin_that_is_just_full_is_filled():
    batch = tiny.collator(pack=True)(tiny.trajectories([[1] * 8] * 2, [[2] * 3] * 2))
    assert batch.inputs.scored.any(-1).sum() == 1


@pytest.mark.parametrize("pack", [True, False])
def test_there_are_no_more_slices_than_there_are_bins_for_all_shards(pack):
    batch = tiny.collator(microbatches=16, shards=8, pack=pack)(tiny.responses(rows=16))
    assert batch.inputs.tokens.shape[:3] == (1, 2, 8)
