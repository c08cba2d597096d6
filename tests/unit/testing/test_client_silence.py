"""The longest silence of a client, as the simulation knows it from answered requests."""

from __future__ import annotations

from quiver.testing.clusters.silence import SignsOfLife


def test_silence_lasts_from_the_beginning_of_a_request_to_the_answer_of_the_next() -> None:
    signs = SignsOfLife(100)
    signs.note(100, 130)
    assert signs.longest_silence_ms(150) == 50
    signs.note(200, 250)
    assert signs.longest_silence_ms(250) == 150


def test_earlier_silence_counts_after_a_sign_of_life() -> None:
    signs = SignsOfLife(0)
    signs.note(900, 1_000)
    signs.note(1_010, 1_020)
    assert signs.longest_silence_ms(1_030) == 1_000


def test_answer_of_an_older_request_does_not_lengthen_the_silence() -> None:
    signs = SignsOfLife(0)
    signs.note(100, 110)
    signs.note(0, 150)
    assert signs.longest_silence_ms(160) == 110
