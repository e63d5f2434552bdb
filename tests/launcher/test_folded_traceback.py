"""Which frames of a traceback are shown."""

from __future__ import annotations

import json
import traceback

import msgspec

from phalanx.runtime.folded_traceback import find_origin, fold_frames, format_folded, library_of

KERAS = "/venv/lib/python3.11/site-packages/keras/src/trainer.py"
NUMPY = "/usr/lib/python3/dist-packages/numpy/core.py"


def frame(filename: str, name: str = "f") -> traceback.FrameSummary:
    return traceback.FrameSummary(filename, 7, name, lookup_line=False, line="g()")


def test_a_file_belongs_to_the_program_unless_it_is_installed() -> None:
    assert library_of(KERAS) == "keras"
    assert library_of(NUMPY) == "numpy"
    assert library_of("/venv/lib/python3.11/site-packages/six.py") == "six"
    assert library_of(msgspec.__file__) == "msgspec"
    assert library_of(json.__file__) == "python"
    assert library_of("<frozen runpy>") == "python"
    assert library_of(fold_frames.__code__.co_filename) == "phalanx"
    assert library_of("/tmp/__autograph_generated_filem6b1.py") == "tensorflow"
    assert library_of("/home/me/train.py") is None
    assert library_of("<string>") is None


def test_neighbouring_frames_of_libraries_are_counted_as_one_line() -> None:
    frames = [
        frame("/me/train.py", "<module>"),
        frame(KERAS),
        frame(KERAS),
        frame(NUMPY),
        frame("/me/train.py", "check"),
    ]
    assert "".join(fold_frames(frames)) == (
        '  File "/me/train.py", line 7, in <module>\n    g()\n'
        "  ... 3 frames of keras and numpy\n"
        '  File "/me/train.py", line 7, in check\n    g()\n'
    )


def raised(code: str, filename: str = "/me/train.py") -> BaseException:
    try:
        exec(compile(code, filename, "exec"), {})
    except BaseException as error:
        return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    raise AssertionError("it raised nothing")


def test_code_that_a_program_compiles_without_a_file_name_is_its_own() -> None:
    error = raised("raise ValueError('bad')", filename="")
    assert format_folded(error).splitlines()[1:] == ['  File "", line 1, in <module>', "ValueError: bad"]
    assert find_origin(error) == ":1, in <module>: "


def test_the_whole_chain_is_folded_and_the_origin_is_the_innermost_line_of_the_program() -> None:
    error = raised(
        "import json\ntry:\n    json.loads('{')\nexcept ValueError as cause:\n    raise KeyError('a') from cause"
    )
    text = format_folded(error)
    assert text.count("  ... 3 frames of python\n") == 1
    assert "json/decoder.py" not in text
    assert "direct cause" in text
    assert text.endswith("KeyError: 'a'\n")
    assert find_origin(error).startswith("/me/train.py:5, in <module>")


def test_members_of_an_exception_group_are_folded_too() -> None:
    group = ExceptionGroup("two", [raised("import json\njson.loads('{')"), ValueError("b")])  # type: ignore[list-item]
    assert "... 3 frames of python" in format_folded(group)


def test_an_error_in_the_syntax_names_its_line() -> None:
    error = raised("x = = 1")
    assert find_origin(error) == "/me/train.py:1: x = = 1"
    assert format_folded(error).endswith("SyntaxError: invalid syntax\n")


def test_a_program_that_is_installed_counts_as_the_program() -> None:
    installed = "/venv/lib/python3.11/site-packages/project/train.py"
    error = raised("import json\ndef f(): json.loads('{')\nf()", installed)
    assert f'File "{installed}", line 3' in format_folded(error)
    assert find_origin(error).startswith(f"{installed}:2, in f")
