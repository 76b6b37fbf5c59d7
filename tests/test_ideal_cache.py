"""The ideal cache against a set of all prefixes, on sessions that fork, repeat and share."""

import numpy as np

from penelope_jax.ideal_cache import IdealCache

PAGE = 4


class PrefixSet:
    """Every whole-page prefix ever stored, with its users."""

    def __init__(self):
        self.users = {}

    def add(self, tokens, session_id, namespace):
        for size in range(PAGE, len(tokens) + 1, PAGE):
            self.users.setdefault((namespace, tokens[:size].tobytes()), set()).add(session_id)

    def look(self, tokens, session_id, namespace):
        hit = shared = 0
        for size in range(PAGE, len(tokens), PAGE):
            users = self.users.get((namespace, tokens[:size].tobytes()))
            if users is None:
                break
            hit = size
            if users - {session_id}:
                shared = size
        return hit, shared


def test_hits_and_shared_tokens_equal_those_of_a_set_of_prefixes():
    rng = np.random.default_rng(0)
    ideal, naive = IdealCache(PAGE), PrefixSet()
    lists = [np.zeros(0, np.int32)]
    num_hits = num_shared = 0
    for _ in range(600):
        base = lists[rng.integers(len(lists))]
        kept = base[: rng.integers(len(base) + 1)]
        tokens = np.concatenate([kept, rng.integers(0, 2, rng.integers(1, 20))]).astype(np.int32)
        who = str(rng.integers(4)), str(rng.integers(2))
        found = ideal.look(tokens, *who)
        assert found == naive.look(tokens, *who)
        num_hits += found.hit > 0
        num_shared += found.shared > 0
        if rng.random() < 0.8:
            ideal.add(tokens, *who)
            naive.add(tokens, *who)
            lists.append(tokens)
    assert num_hits > 200 and num_shared > 100
    assert ideal.num_pages == len(naive.users)
