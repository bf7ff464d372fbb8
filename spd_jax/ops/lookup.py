"""The 2-gram lookup baseline: a drafter without weights that any trained head has to beat.

It proposes the id that followed the latest earlier occurrence of the last two ids.
"""

from __future__ import annotations

from collections.abc import Sequence


def hits_by_position(ids: Sequence[int]) -> list[bool]:
    """Returns one flag per id: the lookup, shown all ids before it, names it.

    Without an earlier occurrence nothing is proposed, which counts as a miss.
    """
    followers: dict[tuple[int, int], int] = {}  # two ids -> what last followed them
    hits = [False] * len(ids)
    for i in range(2, len(ids)):
        pair = (ids[i - 2], ids[i - 1])
        hits[i] = followers.get(pair) == ids[i]
        followers[pair] = ids[i]
    return hits


def lookup_hits(prompt: Sequence[int], tokens: Sequence[int]) -> list[bool]:
    """Scores the lookup where decoding scores drafts: every new token but the first.

    The first token comes from the prefill and is never drafted.
    """
    return hits_by_position([*prompt, *tokens])[len(prompt) + 1 :]
