"""The 2-gram lookup baseline: a drafter without weights that any trained head has to beat.

It proposes the id that followed the latest earlier occurrence of the last two ids.
"""

from __future__ import annotations

from collections.abc import Sequence


def lookup_hits(prompt: Sequence[int], tokens: Sequence[int]) -> list[bool]:
    """Scores the lookup where decoding scores drafts: every token of `tokens` but the first.

    The first token comes from the prefill and is never drafted. Without an earlier occurrence
    nothing is proposed, which counts as a miss.

    Args:
      prompt: ids of the prompt, at least one.
      tokens: the new ids that follow it.

    Returns:
      One flag per scored token, len(tokens) - 1 of them.
    """
    ids = [*prompt, *tokens]
    followers: dict[tuple[int, int], int] = {}  # two ids -> what last followed them
    hits = []
    for i in range(2, len(ids)):
        pair = (ids[i - 2], ids[i - 1])
        if i > len(prompt):
            hits.append(followers.get(pair) == ids[i])
        followers[pair] = ids[i]
    # Two ids before the second new token exist whenever the prompt has one: nothing was skipped.
    return hits
