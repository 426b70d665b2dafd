"""Chat templates that take too much are refused soon, and stop nobody else meanwhile."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mtp_jax.errors import RequestError
from mtp_jax.text import chat_template, render
from mtp_jax.text.chat_template import ChatTemplate

TOWER = "{% set x = [1.5] * 100 %}{% set x = [x] * 100 %}{% set x = [x] * 100 %}{% set x = [x] * 100 %}"
DOUBLING = (
    "{% set s = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}"
)
LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
# Of processor time, on which the system keeps no exact watch; the process starts, too.
SOON = chat_template.SECONDS + 3


def spent() -> float:
    """Processor seconds of the processes that were started and have ended: of those that a limit ended."""
    used = os.times()
    return used.children_user + used.children_system


@pytest.fixture(autouse=True)
def begun() -> None:
    """What it takes to start a process is not what a template takes."""
    ChatTemplate("x").render({})


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(TOWER + "{{ x | tojson }}", marks=pytest.mark.rest),  # below, beside other threads
        *(
            pytest.param(template, marks=pytest.mark.slow)  # they take all of a second, too
            for template in (
                TOWER + "{{ x | tojson(indent=9) }}",
                TOWER + "{{ x | string | length }}",
                TOWER + "{{ x ~ '' }}",
                TOWER + "{{ x | sum(start=[]) | join }}",
                LOOPS.replace("range(9999)", "('x' * 9999)"),
            )
        ),
        LOOPS,
        pytest.param(DOUBLING, marks=pytest.mark.rest),
        "{{ 'x' * 10 ** 10 }}",
        "{{ 'x' | center(10 ** 11) }}",
        "{{ '%100000000000d' % 1 }}",
        "{{ 'x'.ljust(10 ** 11) }}",
        pytest.param("{{ 1.5 | round(10 ** 9, 'ceil') }}", marks=pytest.mark.rest),
        pytest.param("{{ 9 ** (9 ** 9) }}", marks=pytest.mark.rest),
        "{{ range(99999) | batch(10 ** 11, 0) | list }}",
        "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    ],
)
def test_what_takes_too_much_is_refused_soon(template: str) -> None:
    before = spent()
    limits = "takes more than 1 s of processor time|takes more than 1024 MiB|of more than 16000000 characters"
    with pytest.raises(RequestError, match=f'the chat template "default" (makes a prompt )?({limits})'):
        ChatTemplate(template).render({})
    assert spent() - before < SOON
    assert ChatTemplate("{{ 6 * 7 }}").render({}) == "42"


def test_a_template_that_is_named_is_named_in_the_error() -> None:
    named = ChatTemplate([{"name": "tool_use", "template": "{{ 'x' * 10 ** 10 }}"}])
    with pytest.raises(RequestError, match='template "tool_use" takes more than'):
        named.render({"tools": []})


def test_other_threads_go_on_meanwhile() -> None:
    """None could while one operation held the interpreter."""
    done, rounds = threading.Event(), 0
    slow = ChatTemplate(TOWER + "{{ x | tojson }}")

    def work() -> None:
        with pytest.raises(RequestError, match="processor time"):
            slow.render({})
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    others = ChatTemplate("{{ n }}")
    while not done.wait(0.01):
        assert others.render({"n": rounds}) == str(rounds)
        rounds += 1
    thread.join()
    assert rounds > 10


def test_many_threads_get_their_own_answers() -> None:
    template = ChatTemplate("{{ n }}{{ '\u00e9' * n }}\ud83d")  # a half of a character, too
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: template.render({"n": n}), range(200)))
    assert found == [str(n) + "\u00e9" * n + "\ud83d" for n in range(200)]


def test_a_process_that_was_ended_is_started_again() -> None:
    process, _ = chat_template._idle[-1]
    process.kill()
    process.wait()
    assert ChatTemplate("a").render({}) == "a"
    assert chat_template._idle[-1][0].pid != process.pid


def test_modules_of_the_working_folder_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat_template._end_idle()
    (tmp_path / "jinja2.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    assert ChatTemplate("a").render({}) == "a"


def test_a_process_is_kept() -> None:
    before = [process.pid for process, _ in chat_template._idle]
    assert ChatTemplate("{{ 1 / 0 if n else n }}").render({"n": 0}) == "0"
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        ChatTemplate("{{ 1 / 0 if n else n }}").render({"n": 1})
    with pytest.raises(RequestError, match="of more than 16000000 characters"):
        ChatTemplate(f"{{{{ 'x' * {render.MAX_PROMPT_CHARS + 1} }}}}").render({})
    assert [process.pid for process, _ in chat_template._idle] == before


def test_values_that_are_not_json_are_refused() -> None:
    with pytest.raises(RequestError, match="the messages are not JSON: Object of type set"):
        ChatTemplate("{{ x }}").render({"x": {1}})
    assert ChatTemplate("a").render({}) == "a"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads /proc")
def test_it_ends_with_who_started_it() -> None:
    """Who is killed cannot tidy up."""
    program = (
        "import os, signal\n"
        "from mtp_jax.text import chat_template as c\n"
        "c.ChatTemplate('x').render({})\n"
        "print(c._idle[0][0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, env=dict(os.environ))
    for _ in range(1000):
        if not Path(f"/proc/{int(ended.stdout)}/cmdline").exists():
            return
        time.sleep(0.01)
    raise AssertionError("it is still there")
