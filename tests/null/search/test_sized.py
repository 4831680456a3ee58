"""A cache of answers up to a total length."""

from __future__ import annotations

from search.sized import SizedCache


def test_the_last_used_are_kept_as_long_as_they_are_short_enough_together() -> None:
    asked: list[int] = []

    def make(n: int) -> list[int]:
        asked.append(n)
        return [0] * n

    cache = SizedCache(make, 10)
    for n in (4, 5, 4, 3, 4, 5):  # 5, used longest ago, gives way to 3
        assert len(cache(n)) == n
    assert asked == [4, 5, 3, 5]
    assert len(cache(50)) == 50  # longer than all it holds: alone
    assert cache.size == 50
    assert cache(50) is cache(50)
    cache.cache_clear()
    assert cache.size == 0
    assert len(cache(3)) == 3
