"""Sums of a run whatever the order of their additions: the summands of a residual stream, or of a layer's input.

Additions are associative, so that their order, and where a tensor is broadcast, says nothing about a model. What can be known of
a sum is the set of its summands, and which other sums, of those that something reads, have the same ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TypeAlias

Ids: TypeAlias = frozenset[int]
Summand: TypeAlias = tuple[int, str, Ids]
"""The number of an operation, the name of the parameter where it added one, and the operations that sliced it."""


def summand(number: int, name: str = "") -> frozenset[Summand]:
    """Return the summand that an operation's result is: itself, or a parameter that it added."""
    return frozenset({(number, name, frozenset())})


class Sums:
    """The sums that an operation other than an addition reads.

    A stream x, to which W x + b is added, and U (x + W x + b) after that, as long as something reads each of them:

    >>> sums = Sums()
    >>> sums.sources |= {1: frozenset({1}), 2: frozenset({2})}
    >>> x, b, W, U = summand(0), summand(3, "b"), summand(1), summand(2)
    >>> for members in (x, x | b | W, W | x | b | U):
    ...     sums.read(members)
    >>> [[(number, name) for number, name, _ in sorted(one)] for one in sums.contributions()]
    [[(0, '')], [(1, ''), (3, 'b')], [(2, '')]]
    >>> sums.residual()
    {1, 2}
    """

    def __init__(self) -> None:
        self.joins: dict[int, frozenset[Summand]] = {}  # by the number of a concatenation: the summands of what it joins
        self.sources: dict[int, Ids] = {}  # by that of an operation: the multiplications by weights that its result comes from
        self._read: dict[frozenset[Summand], None] = {}

    def read(self, members: frozenset[Summand]) -> None:
        """Record that something reads a sum."""
        if members:
            self._read[members] = None

    def contributions(self) -> Iterator[frozenset[Summand]]:
        """Yield the summands that are in the same sums: together, one contribution to them."""
        places = self._places()
        groups: dict[Ids, set[Summand]] = defaultdict(set)
        for members in self._read:
            for one in members:
                groups[places(one)].add(one)
        yield from map(frozenset, groups.values())

    def residual(self) -> set[int]:
        """Return the multiplications by weights that are added to other contributions, which do not come from them."""
        places, adding = self._places(), set()
        for members in self._read:
            sources: dict[Ids, set[int]] = defaultdict(set)
            for one in members:
                sources[places(one)] |= frozenset() if one[1] else self.sources.get(one[0], frozenset())
            if len(sources) > 1:
                times = Counter(number for numbers in sources.values() for number in numbers)
                adding |= {number for number, n in times.items() if n == 1}
        return adding

    def makers(self, members: Iterable[Summand]) -> Ids:
        """Return the operations whose results some summands consist of: themselves, or the parts of a concatenation."""
        results, queue = set[int](), list(members)
        while queue:
            number, name, _ = queue.pop()
            if not name and number not in results:
                results.add(number)
                queue += self.joins.get(number, ())
        return frozenset(results)

    def _places(self) -> Callable[[Summand], Ids]:
        """Return a function that numbers the sums that a summand is in, itself or before it was sliced."""
        sums_of: dict[tuple[int, str], dict[Ids, set[int]]] = defaultdict(lambda: defaultdict(set))
        for k, members in enumerate(self._read):
            for number, name, cuts in members:
                sums_of[number, name][cuts].add(k)

        @cache
        def places(one: Summand) -> Ids:
            return frozenset().union(*(sums for cuts, sums in sums_of[one[:2]].items() if cuts <= one[2]))

        return places
