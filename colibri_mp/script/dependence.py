"""What depends on what in a script: answers that a text needs, sessions that wait for others.

A repeat of a session pairs with the same repeat of one that is played as often; otherwise it waits for all repeats, and can
take answers only of a session that is played once.
"""

import difflib
import graphlib

from colibri_mp.script.definition import Script, Session, Turn
from colibri_mp.script.placeholders import Answer
from colibri_mp.script.section import Problems


def check_dependence(problems: Problems, script: Script) -> None:
    """Note every reference to something that will not be there."""
    names = [session.name for session in script.sessions]
    for session in script.sessions:
        for name in session.after:
            if name not in names:
                nearest = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(names)}"
                problems.add(f"session {session.name!r}", "after", f"there is no session {name!r}; {hint}")
    if problems.lines:
        return
    for session in script.sessions:
        _check_texts(problems, script, session)
    if cycle := _cycle(script):
        problems.add(f"session {cycle[0]!r}", "after", f"sessions wait for each other: {' -> '.join(cycle)}")


def _check_texts(problems: Problems, script: Script, session: Session) -> None:
    where = f"session {session.name!r}"
    for answer in session.system.answers if session.system else ():
        if wrong := _wrong(script, session, answer, 0):
            problems.add(where, "system", wrong)
    for number, turn in enumerate(session.turns):
        for answer in turn.text.answers if turn.text else ():
            if wrong := _wrong(script, session, answer, number):
                problems.add(where, f"turn {number + 1}", "text", wrong)
        if number == 0 and _has_condition(turn):
            problems.add(where, "turn 1", "when and unless look at the answer before, and there is none yet")


def _has_condition(turn: Turn) -> bool:
    return turn.when is not None or turn.unless is not None


def _wrong(script: Script, session: Session, answer: Answer, num_before: int) -> str:
    """What is wrong with a reference, "" if nothing; `num_before` answers of the session itself are there."""
    if answer.session is None:
        return _wrong_index(answer.index, num_before, "before it")
    if answer.session not in session.after:
        return f"takes an answer of {answer.session!r}: add it to after, so that it has ended by then"
    other = script.session(answer.session)
    if other.repeat not in (1, session.repeat):
        return f"takes an answer of {other.name!r}, which is played {other.repeat} times: play it once, or as often as this"
    return _wrong_index(answer.index, len(other.turns), f"of {other.name!r}")


def _wrong_index(index: int, num_answers: int, whose: str) -> str:
    if -num_answers <= index < num_answers:
        return ""
    shown = "{answer}" if index == -1 else f"{{answers[{index}]}}"
    have = "no answer" if num_answers == 0 else f"only {num_answers} (from 0)" if num_answers > 1 else "only answers[0]"
    return f"{shown}: there is {have} {whose}"


def _cycle(script: Script) -> list[str]:
    """Names of sessions each of which waits for the next, the first one again at the end; empty if there are none."""
    try:
        graphlib.TopologicalSorter({session.name: session.after for session in script.sessions}).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))  # graphlib names the one waited for first
    return []
