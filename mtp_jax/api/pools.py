"""The threads beside the event loop, apart by what may wait for what."""

from concurrent.futures import ThreadPoolExecutor

_THREADS = 2
# Twice as many as trials run at a time: half may wait for a trial, or take a grammar that is known.
_GRAMMAR_THREADS = 8


class Pools:
    """Prompts on their way to the engine wait neither for what goes nowhere near it nor for grammars.

    Attributes:
        tokenise: makes prompts, and answers of as much work.
        grammar: the same for requests with a grammar, which may take seconds to compile.
        beside: everything else.
    """

    def __init__(self) -> None:
        self.tokenise = ThreadPoolExecutor(_THREADS, "tokenise")
        self.grammar = ThreadPoolExecutor(_GRAMMAR_THREADS, "grammar")
        self.beside = ThreadPoolExecutor(_THREADS, "beside")

    def close(self) -> None:
        """End them; what runs is not waited for."""
        for pool in (self.tokenise, self.grammar, self.beside):
            pool.shutdown(wait=False)
