"""The ports at which ranks of tests meet."""

from shared.processes import free_port


def test_ports_that_are_asked_for_one_after_another_differ() -> None:
    assert len({free_port() for _ in range(64)}) == 64
