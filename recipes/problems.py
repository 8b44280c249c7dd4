"""Generated worked problems in chat form: arithmetic, dates, sorting, counting, word problems, unanswerable ones,
copying.

Every problem is a function of its own number: ``problem(seed, index)`` draws from
``random.Random(f"{seed}/{index}")`` and nothing else, so the training set (seed "train") and the suite (seed "suite")
cannot share a random stream, and a single problem can be rebuilt alone. Answers are computed, never written by hand,
and end in ``Answer: ...`` so that a program can check them. Copy tasks take their text from the caller, because what
to copy decides which split they belong to.
"""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# fmt: off
NAMES = [
    "Anna", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Leo", "Maya",
    "Nils", "Olga", "Pavel", "Rosa", "Sami", "Tara", "Victor",
]
THINGS = [
    "apples", "books", "pencils", "tickets", "stamps", "coins", "marbles", "cookies", "shells", "cards", "eggs",
    "buttons", "bottles", "lemons", "keys",
]
WORDS = [
    "river", "stone", "window", "garden", "paper", "silver", "morning", "bridge", "basket", "candle", "forest",
    "island", "jacket", "kitchen", "ladder", "market", "needle", "orange", "pocket", "rabbit", "saddle", "table",
    "umbrella", "valley", "winter", "yellow", "zebra", "anchor", "button", "castle", "dragon", "engine",
    "feather", "guitar",
]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]
# fmt: on
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


@dataclass(frozen=True)
class Problem:
    """One question and its worked answer."""

    kind: str  # name of the generator
    question: str
    answer: str
    prediction: str | None = None  # the text that the answer repeats, for copy tasks


def _add(r: random.Random) -> tuple[str, str]:
    a, b = r.randint(2, 10 ** r.randint(1, 3)), r.randint(2, 10 ** r.randint(1, 3))
    ask = r.choice(
        ["What is {a} + {b}?", "Add {a} and {b}.", "Compute {a} plus {b}.", "Please work out the sum of {a} and {b}."]
    )
    tens = b // 10 * 10
    steps = f"{a} + {tens} = {a + tens}.\n{a + tens} + {b - tens} = {a + b}.\n" if b > 10 else f"{a} + {b} = {a + b}.\n"
    return ask.format(a=a, b=b), f"{steps}Answer: {a + b}"


def _subtract(r: random.Random) -> tuple[str, str]:
    a = r.randint(20, 999)
    b = r.randint(2, a - 1)
    ask = r.choice(
        ["What is {a} - {b}?", "Subtract {b} from {a}.", "How much is {a} minus {b}?", "Take {b} away from {a}."]
    )
    tens = b // 10 * 10
    return ask.format(a=a, b=b), f"{a} - {tens} = {a - tens}.\n{a - tens} - {b - tens} = {a - b}.\nAnswer: {a - b}"


def _multiply(r: random.Random) -> tuple[str, str]:
    a, b = r.randint(3, 99), r.randint(3, 12)
    ask = r.choice(
        ["What is {a} times {b}?", "Multiply {a} by {b}.", "Compute {a} * {b}.", "What do you get for {a} x {b}?"]
    )
    tens, ones = a // 10 * 10, a % 10
    steps = f"{tens} * {b} = {tens * b}.\n{ones} * {b} = {ones * b}.\n{tens * b} + {ones * b} = {a * b}."
    return ask.format(a=a, b=b), f"{steps}\nAnswer: {a * b}"


def _word_problem(r: random.Random) -> tuple[str, str]:
    who, other = r.sample(NAMES, 2)
    thing = r.choice(THINGS)
    a, b, c = r.randint(10, 90), r.randint(2, 9), r.randint(2, 9)
    shape = r.randrange(5)
    if shape == 0:
        text = f"{who} has {a} {thing}. {other} gives {who} {b} more, and then {who} loses {c}. "
        text += f"How many {thing} does {who} have now?"
        steps, answer = f"{who} starts with {a} {thing}.\n{a} + {b} = {a + b}.\n{a + b} - {c} = {a + b - c}.", a + b - c
    elif shape == 1:
        text = f"There are {b} boxes with {c} {thing} each. {who} takes {min(b, c)} {thing} out. "
        text += f"How many {thing} are left?"
        steps, answer = f"{b} * {c} = {b * c}.\n{b * c} - {min(b, c)} = {b * c - min(b, c)}.", b * c - min(b, c)
    elif shape == 2:
        text = f"{who} shares {b * c} {thing} equally among {b} friends. How many {thing} does each friend get?"
        steps, answer = f"{b * c} / {b} = {c}.", c
    elif shape == 3:
        text = f"{who} buys {b} bags of {thing} for {c} coins each and pays with {b * c + a} coins. "
        text += f"How many coins does {who} get back?"
        steps, answer = f"The bags cost {b} * {c} = {b * c} coins.\n{b * c + a} - {b * c} = {a}.", a
    else:
        text = f"{who} reads {b} pages a day. How many pages does {who} read in {c} weeks?"
        steps, answer = f"{c} weeks are {c} * 7 = {c * 7} days.\n{c * 7} * {b} = {c * 7 * b}.", c * 7 * b
    return text, f"{steps}\nAnswer: {answer}"


def _weekday(r: random.Random) -> tuple[str, str]:
    start, step = r.randrange(7), r.randint(2, 40)
    ask = r.choice(
        ["Today is {d}. Which day is it in {n} days?", "If today is {d}, what day of the week is it {n} days from now?"]
    )
    end = DAYS[(start + step) % 7]
    steps = f"{step} days are {step // 7} weeks and {step % 7} days.\n{step % 7} days after {DAYS[start]} is {end}."
    return ask.format(d=DAYS[start], n=step), f"{steps}\nAnswer: {end}"


def _date(r: random.Random) -> tuple[str, str]:
    day = datetime.date(r.randint(1990, 2030), r.randint(1, 12), r.randint(1, 20))
    step = r.randint(1, 8)
    end = day + datetime.timedelta(days=step)
    written = f"{day.day} {MONTHS[day.month - 1]} {day.year}"
    if r.random() < 0.5:
        ask = r.choice(["Write the date {d} as YYYY-MM-DD.", "Convert {d} to ISO format."])
        month = MONTHS[day.month - 1]
        return ask.format(d=written), f"{month} is month {day.month:02d}.\nAnswer: {day.isoformat()}"
    question = f"What is the date {step} days after {written}?"
    steps = f"{day.day} + {step} = {day.day + step}." if end.month == day.month else "The month changes."
    return question, f"{steps}\nAnswer: {end.day} {MONTHS[end.month - 1]} {end.year}"


def _sort_numbers(r: random.Random) -> tuple[str, str]:
    numbers = r.sample(range(1, 100), r.randint(4, 9))
    down = r.random() < 0.3
    ask = "from largest to smallest" if down else r.choice(["from smallest to largest", "in increasing order"])
    ordered = sorted(numbers, reverse=down)
    first = "largest" if down else "smallest"
    listed = ", ".join(map(str, ordered))
    steps = f"The {first} number is {ordered[0]}, then {ordered[1]}, then {ordered[2]}."
    return f"Sort these numbers {ask}: {', '.join(map(str, numbers))}.", f"{steps}\nAnswer: {listed}"


def _sort_words(r: random.Random) -> tuple[str, str]:
    words = r.sample(WORDS, r.randint(4, 7))
    ask = r.choice(
        [
            "Put these words in alphabetical order",
            "Sort these words alphabetically",
            "Order the following words from A to Z",
        ]
    )
    return f"{ask}: {', '.join(words)}.", f"Answer: {', '.join(sorted(words))}"


def _count(r: random.Random) -> tuple[str, str]:
    if r.random() < 0.5:
        words = r.sample(WORDS, r.randint(4, 9))
        ask = r.choice(["How many words are in this list?", "Count the words."])
        steps = "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))
        return f"{ask} {' '.join(words)}", f"{steps}\nAnswer: {len(words)}"
    pool = r.sample(WORDS, 3)
    words = [r.choice(pool) for _ in range(r.randint(5, 10))]
    number = words.count(pool[0])
    running = 0
    listed: list[str] = []
    for word in words:
        running += word == pool[0]
        listed.append(f"{word}: {running}")
    return f"How often does the word {pool[0]} occur in: {' '.join(words)}?", "\n".join(listed) + f"\nAnswer: {number}"


def _largest(r: random.Random) -> tuple[str, str]:
    numbers = r.sample(range(10, 1000), r.randint(3, 7))
    which = r.choice(["largest", "smallest"])
    best = max(numbers) if which == "largest" else min(numbers)
    ask = r.choice(["Which of these numbers is the {w}: {n}?", "Find the {w} number in this list: {n}."])
    steps, running = [f"Start with {numbers[0]}."], numbers[0]
    for number in numbers[1:]:
        better = number > running if which == "largest" else number < running
        running = number if better else running
        steps.append(f"{number}: {'yes' if better else 'no'}, keep {running}.")
    return ask.format(w=which, n=", ".join(map(str, numbers))), "\n".join(steps) + f"\nAnswer: {best}"


def _reverse(r: random.Random) -> tuple[str, str]:
    words = r.sample(WORDS, r.randint(4, 8))
    ask = r.choice(["Write these words in reverse order", "Reverse the order of this list"])
    steps = f"The last word is {words[-1]}, so start with it."
    return f"{ask}: {', '.join(words)}.", f"{steps}\nAnswer: {', '.join(reversed(words))}"


def _unanswerable(r: random.Random) -> tuple[str, str]:
    who, other = r.sample(NAMES, 2)
    thing = r.choice(THINGS)
    a = r.randint(3, 90)
    text, missing = r.choice(
        [
            (
                f"{who} has some {thing} and gets {a} more from {other}. How many {thing} does {who} have now?",
                f"how many {thing} {who} had before",
            ),
            (f"{who} buys {a} {thing}. How much does {who} pay?", f"what one of the {thing} costs"),
            (f"{other} is {a} years old. How old is {who}?", f"how the ages of {who} and {other} are related"),
            (f"A train leaves at {r.randint(1, 12)}:00. When does it arrive?", "how long the journey takes"),
            (
                f"{who} divides the {thing} equally among {a} friends. How many does each friend get?",
                f"how many {thing} there are",
            ),
        ]
    )
    return text, f"The question does not say {missing}.\nAnswer: cannot be known"


GENERATORS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "add": _add, "subtract": _subtract, "multiply": _multiply, "word_problem": _word_problem, "weekday": _weekday,
    "date": _date, "sort_numbers": _sort_numbers, "sort_words": _sort_words, "count": _count, "largest": _largest,
    "reverse": _reverse, "unanswerable": _unanswerable,
}  # fmt: skip


def problem(seed: str, index: int, kinds: Sequence[str] = ()) -> Problem:
    """Problem number `index` of the stream `seed`; `kinds` limits the generators."""
    r = random.Random(f"{seed}/{index}")
    kind = r.choice(list(kinds) or list(GENERATORS))
    question, answer = GENERATORS[kind](r)
    if r.random() < 0.2:
        question = r.choice(["Hello! ", "I have a question. ", "Please help me. ", "Quick question: "]) + question
    return Problem(kind, question, answer)


IDENTIFIER = re.compile(r"\b[a-z][a-z_]{3,}\b")
COMMON = frozenset(
    [
        "self",
        "return",
        "import",
        "from",
        "class",
        "None",
        "True",
        "False",
        "else",
        "elif",
        "with",
        "yield",
        "while",
        "raise",
        "except",
        "assert",
        "this",
        "that",
    ]
)


def copy_task(r: random.Random, text: str, category: str) -> Problem:
    """A task whose answer repeats `text`, as it is or with one name replaced."""
    text = text.strip("\n")
    fence = "```python" if category == "code" else "```"
    noun = "code" if category == "code" else "text"
    names = sorted({w for w in IDENTIFIER.findall(text) if w not in COMMON and len(w) > 4})
    if category == "code" and names and r.random() < 0.6:
        old, new = r.choice(names), r.choice(WORDS) + r.choice(["", "_value", "_name", "_item"])
        ask = r.choice(
            [
                "Rename {o} to {n} in this code.",
                "Repeat this code with the name {o} changed to {n}.",
                "In the code below, replace {o} by {n}.",
            ]
        )
        answer = re.sub(rf"\b{old}\b", new, text)
        return Problem("rename", f"{ask.format(o=old, n=new)}\n{fence}\n{text}\n```", f"{fence}\n{answer}\n```", answer)
    ask = r.choice(["Repeat this {k} exactly.", "Copy the following {k}.", "Write this {k} again, without any change."])
    return Problem("copy", f"{ask.format(k=noun)}\n{fence}\n{text}\n```", f"{fence}\n{text}\n```", text)
