"""`compiler.code_of`: a kernel's code without its comments, which says whether a measurement is still one of it."""

import pytest

from optimized.cuda import compiler


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a  /* one */ +// two\n\n  b;", "a +\nb;"),
        ('asm("a // b  /* c" ::"r"(x));  // d', 'asm("a // b  /* c" ::"r"(x));'),
        (r'"\\" // "  x' + "\n" + r'"\""  y', r'"\\"' + "\n" + r'"\"" y'),
        ("'\"' // '\n'/'  '/'", "'\"'\n'/' '/'"),
        ("1'000  // it's\nu8'/'  // no", "1'000\nu8'/'"),
        ('R"x(// "  )" )x"  // end', 'R"x(// "  )" )x"'),
        ("// goes \\\n on\nx /* // */ y /* ' */ // /*\n  z", "x y\nz"),
        ("#define A 1  // a\n#define B 2", "#define A 1\n#define B 2"),
        ("a + +b", "a + +b"),
    ],
)
def test_code_is_what_remains_without_comments(text: str, code: str) -> None:
    assert compiler.code_of(text) == code
    assert compiler.code_of(code) == code
