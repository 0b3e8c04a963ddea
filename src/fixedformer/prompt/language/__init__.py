"""A small sequence language (select, aggregate, map) with an interpreter, and a compiler to fixed attention networks.

same = select(tokens, tokens, "==")
program = Program("histogram", "abc", count(same))
interpret(program, "abca")                  # [2, 1, 1, 2]: what it means
compiled = compile_program(program, 64)     # a fixed network, verified against the interpreter
compiled.run(["abca"])                      # [[2.0, 1.0, 1.0, 2.0]]
"""

from fixedformer.prompt.language.compiler import CompiledProgram, compile_program
from fixedformer.prompt.language.diagram import draw, to_dot
from fixedformer.prompt.language.expressions import (
    NO_MATCH,
    Expr,
    absolute,
    aggregate,
    as_number,
    choose,
    compare,
    constant,
    count,
    equal,
    exists,
    first,
    length,
    lookup,
    matched,
    maximum,
    minimum,
    otherwise,
    position,
    relu,
    select,
    select_all,
    symbol,
    tokens,
)
from fixedformer.prompt.language.interpreter import interpret
from fixedformer.prompt.language.library import LIBRARY, library_program
from fixedformer.prompt.language.program import Program
from fixedformer.prompt.language.text import parse, to_text
from fixedformer.prompt.language.verify import verify_program

__all__ = [
    "LIBRARY",
    "NO_MATCH",
    "CompiledProgram",
    "Expr",
    "Program",
    "absolute",
    "aggregate",
    "as_number",
    "choose",
    "compare",
    "compile_program",
    "constant",
    "count",
    "draw",
    "equal",
    "exists",
    "first",
    "interpret",
    "length",
    "library_program",
    "lookup",
    "matched",
    "maximum",
    "minimum",
    "otherwise",
    "parse",
    "position",
    "relu",
    "select",
    "select_all",
    "symbol",
    "to_dot",
    "to_text",
    "tokens",
    "verify_program",
]
