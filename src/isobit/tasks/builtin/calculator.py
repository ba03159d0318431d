"""Calculator: arithmetic of many digits with a Python tool, such as "738211*40122=".

The tool is `python`, which runs a program in the cage of code rewards and says what it prints. A
small model cannot multiply six digits, but it can write the product as a program and copy what that
prints. The reward is 1 where the last answer of an episode is the right number and nothing else.

With `demonstrations` the examples are single turns for supervised training: a question, which is
answered by a call of the tool in most and by the number itself in the others (`direct`), and a
question with the call and its result, which is answered by the number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from isobit.data.dataset import Dataset, Example
from isobit.errors import IsobitError
from isobit.options.declare import at_least, at_most
from isobit.options.reading import OptionError
from isobit.tasks.builtin.arithmetic import REWARD, Operators, gold_answer
from isobit.tasks.builtin.task import (
    PRINTABLE,
    SEED,
    Task,
    TaskSettings,
    draws_of,
    made_here,
    user_says,
)
from isobit.tasks.rewards.sandbox.launch import Limits, run_caged, side

DEFAULT_HELD_OUT_SIZE = 256
CALL = '[python(code="{}")]'
"""How demonstrations call the tool (`environment.parser: pythonic`)."""
_MOST_CHARACTERS = 200
"""That the tool says."""
_PROGRAM = """
source, run, value_of = {source!r}, exec, eval
try:
    try:
        program = compile(source, "program.py", "eval")
    except SyntaxError:
        run(compile(source, "program.py", "exec"))
    else:
        value = value_of(program)
        if value is not None:
            print(value)
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
_LIMITS = Limits(timeout_s=5.0, memory_mib=512, disk_mib=1, processes=16, output_bytes=1 << 16)


@dataclass(frozen=True)
class CalculatorOptions:
    """The problems that the task makes: operators, digits, and whether rows demonstrate the
    call."""

    digits: Annotated[int, at_least(1), at_most(50), "most digits of an operand"] = 6
    min_digits: Annotated[int, at_least(1), "fewest digits of an operand"] = 4
    operators: Operators = "*"
    train_size: Annotated[int, at_least(1), at_most(1_000_000), "examples to train on"] = 4_000
    demonstrations: Annotated[
        bool, "examples are single turns to learn from: calls of the tool, and answers"
    ] = False
    direct: Annotated[
        float, at_least(0), at_most(1), "part of the demonstrations that answer without the tool"
    ] = 0.4
    seed: SEED = 0

    def __post_init__(self) -> None:
        if self.min_digits > self.digits:
            raise OptionError(
                ("min_digits",),
                f"must not be above digits, got {self.min_digits} and {self.digits}",
            )


def load(settings: TaskSettings) -> Task:
    """Build the task from its options. A prompt is a chat of one message, the question."""
    options, held = made_here(CalculatorOptions, settings, DEFAULT_HELD_OUT_SIZE)
    made = problems(options, held + options.train_size)
    make = _turn if options.demonstrations else _question
    held_out = [make(index, problem, options) for index, problem in enumerate(made[:held])]
    train = [make(index, problem, options) for index, problem in enumerate(made[held:])]
    return Task(
        "calculator",
        Dataset(train, settings.seed, settings.shuffle),
        Dataset(held_out, settings.seed),
        () if options.demonstrations else (REWARD,),
        gold="said" if options.demonstrations else "answer",
        alphabet=PRINTABLE,
    )


def problems(options: CalculatorOptions, count: int) -> list[tuple[str, int, int, int]]:
    """Draw `count` distinct problems, each (operator, left, right, a random number). Raises
    IsobitError where the options give fewer."""
    draws = draws_of(options.seed)
    numbers: dict[tuple[str, int, int], int] = {}
    for _ in range(100 * count):
        problem = (
            options.operators[next(draws) % len(options.operators)],
            _operand(draws, options),
            _operand(draws, options),
        )
        numbers.setdefault(problem, next(draws))
        if len(numbers) == count:
            return [(*problem, number) for problem, number in numbers.items()]
    raise IsobitError(
        f"task calculator: these options give only about {len(numbers)} problems, {count} are asked "
        "for (train_size + held_out_size); raise digits"
    )


def _operand(draws: Iterator[int], options: CalculatorOptions) -> int:
    """Draw an operand of `min_digits` to `digits` decimal digits, each length equally likely."""
    digits = options.min_digits + next(draws) % (options.digits - options.min_digits + 1)
    low = 0 if digits == 1 else 10 ** (digits - 1)
    words = sum(next(draws) << (64 * limb) for limb in range(1 + digits // 19))
    return low + words % (10**digits - low)


def _question(
    index: int, problem: tuple[str, int, int, int], options: CalculatorOptions
) -> Example:
    operator, left, right, _ = problem
    answer = gold_answer(operator, left, right)
    return Example(index, [user_says(f"{left}{operator}{right}=")], {"answer": answer})


def _turn(index: int, problem: tuple[str, int, int, int], options: CalculatorOptions) -> Example:
    operator, left, right, number = problem
    expression, answer = f"{left}{operator}{right}", gold_answer(operator, left, right)
    chat, call = [user_says(f"{expression}=")], CALL.format(expression)
    if number % 2:
        direct = (number >> 8) % 1000 < 1000 * options.direct
        return Example(index, chat, {"said": answer if direct else call})
    result = {"role": "tool", "name": "python", "content": answer}
    chat += [{"role": "assistant", "content": call}, result]
    return Example(index, chat, {"said": answer})


def python(code: str) -> str:
    """Run a Python program.

    Args:
        code: The program, or an expression, whose value is printed.
    """
    files = side("script", program=_PROGRAM.format(source=code))
    outcomes = run_caged(files, "script.py", [""], _LIMITS, "namespaces")
    if not outcomes or outcomes[0].status != 0:
        return "error: it was stopped"
    text = outcomes[0].output.strip()[:_MOST_CHARACTERS]
    return "".join(c if c in PRINTABLE else "?" for c in text)
