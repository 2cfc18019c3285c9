"""What counts as a small change of a source."""

from __future__ import annotations

import ast

from mutations import mutations

SOURCE = '''
def f(a, b=1):
    """Doc 1."""
    if a < 2 and not b:
        a += 1
        g(a)
    return a * 3
'''
EXPECTED = {
    (2, "1 -> 2"),
    (4, "if a < 2 and (not b): -> if not (a < 2 and (not b)):"),
    (4, "a < 2 and (not b) -> a < 2 or not b"),
    (4, "a < 2 -> a <= 2"),
    (4, "2 -> 3"),
    (4, "not b -> not not b"),
    (4, "a += 1 -> pass"),
    (4, "g(a) -> pass"),
    (5, "1 -> 2"),
    (7, "return a * 3 -> return None"),
    (7, "a * 3 -> a // 3"),
    (7, "3 -> 4"),
}


def test_each_place_is_changed_in_each_way() -> None:
    found = {(mutation.line, mutation.what) for mutation in mutations(SOURCE)}
    assert found == EXPECTED


def test_every_mutant_is_another_program_that_python_reads() -> None:
    original = ast.dump(ast.parse(SOURCE))
    sources = [mutation.source for mutation in mutations(SOURCE)]
    assert len(set(sources)) == len(sources)
    assert all(ast.dump(ast.parse(source)) != original for source in sources)
