"""Grammars as other servers take them, in llguidance's Lark syntax."""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from mtp_jax.errors import RequestError

_MOST_RULES = 500  # the conversion takes the square of their number: 0.1 s for these
_MOST_DIGITS = 9  # of a token's id
_HEADER = "%llguidance {}"
_RULE = re.compile(r"::=")
# The expressions below look at each character a few times at most, as a search for one holds up all threads.
# llguidance's own search begins anew in each line of white space, and reads on to the end of all of it.
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)
# Comments, strings and expressions, in which nothing stands for a token; and a line from a sign on that
# begins one and has no end.
_LITERAL = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(["/][^\n]*)')
_TOKENS = re.compile(r"<\[([^\]\s<]*)\]>")


def is_lark(grammar: str) -> bool:
    """Whether a grammar is in Lark's syntax, rather than in the EBNF of llama.cpp."""
    return _LARK.search(grammar) is not None


def of_ebnf(grammar: str) -> str:
    """The Lark syntax of a grammar in the EBNF of llama.cpp (GBNF), which other servers call EBNF.

    Raises RequestError for another text.
    """
    count = len(_RULE.findall(grammar))
    if count > _MOST_RULES:
        raise RequestError(f"the grammar has {count} rules; at most {_MOST_RULES} are allowed")
    try:
        return gbnf_to_lark(grammar).removeprefix(_HEADER).lstrip()
    except RecursionError:
        raise RequestError("the grammar is nested too deep; write rules of their own") from None
    except Exception as error:  # llguidance raises plain exceptions, too
        told = " ".join(str(error).split())[:200]
        raise RequestError(
            f"the grammar is not valid EBNF: {told}; expected rules such as: root ::= [a-z]+"
        ) from error


def token_ids(lark: str) -> list[int]:
    """Ids of the tokens that a grammar in Lark's syntax names. Raises RequestError for sets of ids."""
    found = _TOKENS.findall(_LITERAL.sub(lambda found: found[1] or " ", lark))
    sets = [ids for ids in found if not ids.isdecimal() or len(ids) > _MOST_DIGITS]
    if sets:
        raise RequestError(f"the grammar names tokens by <[{sets[0]:.40}]>; expected one id, such as <[7]>")
    return [int(ids) for ids in found]
