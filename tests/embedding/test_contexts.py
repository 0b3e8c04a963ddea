"""Contexts against their definition, counted place by place in plain Python."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from fixedformer.embedding.contexts import Contexts


def seen(row, place, mask):
    return row[: place + 1] if mask == "causal" else row


@given(st.data())
def test_contexts_are_token_and_counts(data):
    d_in, tokens, mask = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 6)),
        data.draw(st.sampled_from([None, "causal"])),
    )
    X = data.draw(
        st.lists(st.lists(st.integers(0, d_in - 1), min_size=tokens, max_size=tokens), min_size=1, max_size=4)
    )
    contexts = Contexts.of(torch.tensor(X), d_in, mask)
    found = set()
    for i, row in enumerate(X):
        for j, token in enumerate(row):
            counts = Counter(seen(row, j, mask))
            index = int(contexts.where[i, j])
            assert int(contexts.tokens[index]) == token
            assert contexts.counts[index].tolist() == [counts[t] for t in range(d_in)]
            found.add((token, *(counts[t] for t in range(d_in))))
    assert len(contexts.tokens) == len(found)


@given(st.data())
def test_what_a_place_sees_is_counted_by_context(data):
    tokens, mask = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([None, "causal"]))
    X = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens), min_size=1, max_size=4))
    flags = data.draw(
        st.lists(st.lists(st.booleans(), min_size=tokens, max_size=tokens), min_size=len(X), max_size=len(X))
    )
    contexts = Contexts.of(torch.tensor(X), 3, mask)
    sight = contexts.seen_from(torch.tensor(flags), mask)
    places = [(i, j) for i in range(len(X)) for j in range(tokens) if flags[i][j]]
    assert sight.own.tolist() == [int(contexts.where[i, j]) for i, j in places]
    for states, times, (i, j) in zip(sight.seen.tolist(), sight.times.tolist(), places):
        found = Counter()
        for state, count in zip(states, times):
            found[state] += count
        assert +found == Counter(seen(contexts.where[i].tolist(), j, mask))


def test_places_that_nothing_needs_are_dropped():
    X = torch.tensor([[0, 1, 2, 2, 2, 2], [0, 1, 0, 1, 0, 1]])
    needed = torch.tensor([[True, True, False, False, False, False], [True, False, False, False, False, False]])
    contexts = Contexts.of(X, 3, "causal", needed)
    assert len(contexts.tokens) == 2
    assert contexts.tokens[contexts.where[needed]].tolist() == [0, 1, 0]


def test_large_vocabularies_do_not_fit():
    assert Contexts.fit(62, 4)
    assert not Contexts.fit(99, 30)
