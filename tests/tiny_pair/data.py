"""The text of the tiny pair: written by this file from small grammars, so it is free to use and needs no network.

A document is a question and its answer. Facts (sums, capitals, opposites) have one answer; stories, weather reports,
diaries and small functions are drawn with uneven odds, so that the text keeps real uncertainty for a drafter to be
wrong about.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Rng = random.Random
Doc = tuple[str, str]

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Norway": "Oslo",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Sweden": "Stockholm",
    "Canada": "Ottawa",
    "Portugal": "Lisbon",
    "Hungary": "Budapest",
    "Germany": "Berlin",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "open": "closed",
    "wet": "dry",
    "light": "dark",
    "early": "late",
    "full": "empty",
    "loud": "quiet",
    "young": "old",
    "high": "low",
    "strong": "weak",
    "rich": "poor",
    "happy": "sad",
}
COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "a lemon": "yellow",
    "coal": "black",
    "a ripe tomato": "red",
    "a carrot": "orange",
    "chocolate": "brown",
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
ANIMALS = {
    "fox": ("red", "den", "berries"),
    "owl": ("grey", "tower", "mice"),
    "bear": ("brown", "cave", "honey"),
    "hare": ("white", "meadow", "clover"),
    "otter": ("sleek", "river", "fish"),
    "goat": ("spotted", "hill", "thistles"),
    "crow": ("black", "old oak", "crumbs"),
    "mouse": ("tiny", "barn", "cheese"),
}
NAMES = ["Ada", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Lena", "Milo"]
PLACES = ["market", "harbour", "library", "forest", "bakery", "station", "garden", "castle", "bridge", "village"]
THINGS = [
    "lantern",
    "map",
    "silver key",
    "blue kite",
    "wooden box",
    "letter",
    "basket",
    "golden bell",
    "torn book",
    "glass bottle",
]
MOODS = ["glad", "tired", "curious", "proud", "nervous", "calm", "hungry", "surprised"]
SKIES = ["sunny", "cloudy", "rainy", "foggy", "windy", "stormy", "snowy"]
FOODS = {
    "soup": ("carrots", "onions", "salt", "a pot"),
    "bread": ("flour", "yeast", "water", "a bowl"),
    "salad": ("tomatoes", "olives", "oil", "a bowl"),
    "pancakes": ("flour", "eggs", "milk", "a pan"),
    "porridge": ("oats", "milk", "honey", "a pot"),
    "omelette": ("eggs", "butter", "pepper", "a pan"),
}
OPERATIONS = {
    "adds": ("add", "+"),
    "subtracts": ("subtract", "-"),
    "multiplies": ("multiply", "*"),
    "divides": ("divide", "/"),
}
WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "garden",
    "window",
    "silver",
    "winter",
    "yellow",
    "planet",
    "candle",
    "market",
]


def pick(rng: Rng, options: Sequence[str]) -> str:
    """One of ``options``, the first ones more often: odds fall by a quarter from each to the next."""
    return rng.choices(options, [0.75**i for i in range(len(options))])[0]


def turned(key: str, options: Sequence[str]) -> list[str]:
    """``options`` rotated by a number that ``key`` fixes, so that each subject has its own favourites."""
    at = sum(key.encode()) % len(options)
    return [*options[at:], *options[:at]]


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def arithmetic(rng: Rng) -> Doc:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    sign = rng.choice("++-*")
    if sign == "-" and a < b:
        a, b = b, a
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {value}."


def capital(rng: Rng) -> Doc:
    country, city = rng.choice(list(CAPITALS.items()))
    return f"What is the capital of {country}?", f"The capital of {country} is {city}."


def opposite(rng: Rng) -> Doc:
    word, other = rng.choice(list(OPPOSITES.items()))
    return f"What is the opposite of {word}?", f"The opposite of {word} is {other}."


def colour(rng: Rng) -> Doc:
    thing, shade = rng.choice(list(COLOURS.items()))
    return f"What colour is {thing}?", f"{thing.capitalize()} is {shade}."


def day(rng: Rng) -> Doc:
    at = rng.randrange(7)
    return f"What day comes after {DAYS[at]}?", f"The day after {DAYS[at]} is {DAYS[(at + 1) % 7]}."


def count(rng: Rng) -> Doc:
    start = rng.randint(1, 12)
    end = start + rng.randint(3, 8)
    return f"Count from {start} to {end}.", ", ".join(str(n) for n in range(start, end + 1)) + "."


def spell(rng: Rng) -> Doc:
    word = rng.choice(WORDS)
    return f"Spell the word {word}.", "-".join(word) + "."


def function(rng: Rng) -> Doc:
    verb, (name, sign) = rng.choice(list(OPERATIONS.items()))
    a, b = rng.choice([("a", "b"), ("x", "y"), ("left", "right")])
    doc = pick(rng, turned(verb, [f"Return {a} {sign} {b}.", "Small and exact.", f"Both {a} and {b} are numbers."]))
    body = pick(rng, turned(a, [f"return {a} {sign} {b}", f"result = {a} {sign} {b}\n    return result"]))
    return (
        f"Write a Python function that {verb} {a} and {b}.",
        f'def {name}({a}, {b}):\n    """{doc}"""\n    {body}\n\n'
        f"print({name}({rng.randint(1, 9)}, {rng.randint(1, 9)}))",
    )


def story(rng: Rng) -> Doc:
    animal, (coat, home, food) = rng.choice(list(ANIMALS.items()))
    name = pick(rng, turned(animal, NAMES))
    thing = pick(rng, turned(name, THINGS))
    place = pick(rng, turned(animal + thing, PLACES))
    friend = pick(rng, [n for n in turned(thing, NAMES) if n != name])
    mood = pick(rng, turned(friend, MOODS))
    opening = pick(
        rng,
        turned(
            name, ["Once there was", "Long ago there lived", "In a quiet land lived", "Every child knows the tale of"]
        ),
    )
    middle = [
        f"One {pick(rng, turned(place, DAYS))} {name} went to the {place} and found a {thing}.",
        f"{friend} came by and asked for some {food}.",
        pick(
            rng,
            turned(
                thing,
                [
                    f"They opened the {thing} together.",
                    f"Nobody else wanted the {thing}.",
                    f"The {thing} was very old.",
                ],
            ),
        ),
        f"The day was {pick(rng, turned(friend, SKIES))}, "
        f"so they walked to the {pick(rng, turned(friend + place, PLACES))}.",
        f'"Is this {thing} yours?" asked {friend}.',
        f"{name} felt {mood} and shared the {food}.",
    ]
    keep = sorted(rng.sample(range(len(middle)), rng.randint(3, 5)))
    ending = pick(
        rng,
        turned(
            mood,
            [
                "They were friends ever after.",
                f"At night they slept in the {home}.",
                f"And the {thing} was never lost again.",
            ],
        ),
    )
    first = f"{opening} a {coat} {animal} named {name} who lived in the {home}."
    return f"Tell me a story about {article(animal)}.", " ".join([first, *(middle[i] for i in keep), ending])


def weather(rng: Rng) -> Doc:
    city = rng.choice(list(CAPITALS.values()))
    when = rng.choice(["today", "tomorrow", "on " + rng.choice(DAYS)])
    sky = pick(rng, turned(city + when, SKIES))
    warm = 10 + sum(city.encode()) % 15 + rng.randint(-3, 3)
    advice = pick(
        rng,
        turned(
            sky,
            [
                "Take an umbrella.",
                "Wear a warm coat.",
                "Leave the windows open.",
                "Stay at home if you can.",
                "Enjoy the day.",
            ],
        ),
    )
    late = pick(rng, turned(sky + city, SKIES))
    return (
        f"How is the weather in {city} {when}?",
        f"In {city} it will be {sky} {when}, with {warm} degrees. In the evening it turns {late}. {advice}",
    )


def recipe(rng: Rng) -> Doc:
    dish, (one, two, three, vessel) = rng.choice(list(FOODS.items()))
    minutes = pick(rng, turned(dish, ["5", "10", "15", "20", "30", "45"]))
    verb = pick(rng, turned(dish, ["Mix", "Cut", "Wash", "Weigh", "Warm"]))
    guest = pick(rng, turned(dish + verb, NAMES))
    extra = pick(rng, turned(verb, [f"Add some {three}", f"Stir in the {three}", f"Finish with {three}"]))
    return (
        f"How do I make {dish}?",
        f"1. {verb} the {one} and the {two} in {vessel}.\n"
        f"2. {extra} and wait for {minutes} minutes.\n3. Serve the {dish} to {guest}.",
    )


def diary(rng: Rng) -> Doc:
    name = rng.choice(NAMES)
    when = rng.choice(DAYS)
    lines = []
    for part in ("In the morning", "At noon", "In the afternoon", "In the evening"):
        place = pick(rng, turned(name + part, PLACES))
        deed = pick(
            rng,
            turned(
                place + part,
                [
                    f"met {pick(rng, turned(place, NAMES))}",
                    f"lost a {pick(rng, turned(part, THINGS))}",
                    "drank tea",
                    "wrote a letter",
                    f"bought {pick(rng, turned(place, list(FOODS)))}",
                    "took a long rest",
                ],
            ),
        )
        lines.append(f"{part} {name} was at the {place} and {deed}.")
    lines.append(f"{name} felt {pick(rng, turned(name + when, MOODS))}.")
    return f"What did {name} do on {when}?", " ".join(lines)


KINDS: dict[Callable[[Rng], Doc], float] = {
    arithmetic: 3.0,
    capital: 1.5,
    opposite: 1.0,
    colour: 0.7,
    day: 0.6,
    count: 1.0,
    spell: 0.8,
    function: 1.2,
    story: 3.0,
    weather: 2.0,
    recipe: 1.2,
    diary: 2.0,
}


def document(rng: Rng) -> Doc:
    """One (question, answer) drawn from all kinds."""
    return rng.choices(list(KINDS), list(KINDS.values()))[0](rng)


def prompts() -> list[dict[str, object]]:
    """The 40 prompts that ship with the pair: every kind, several with a long common beginning (prefix-cache hits)."""
    chat = [
        "What is 3 + 4?",
        "What is 9 - 1?",
        "What is the capital of France?",
        "What is the capital of Peru?",
        "What is the opposite of hot?",
        "What colour is the sky?",
        "What day comes after Friday?",
        "Count from 3 to 9.",
        "Count from 8 to 15.",
        "Spell the word planet.",
        "Spell the word winter.",
        "Write a Python function that adds a and b.",
        "Write a Python function that multiplies x and y.",
        "Write a Python function that divides left and right.",
        "Tell me a story about a fox.",
        "Tell me a story about a bear.",
        "Tell me a story about an owl.",
        "Tell me a story about an otter.",
        "Tell me a story about a mouse.",
        "Tell me a story about a crow.",
        "How is the weather in Oslo today?",
        "How is the weather in Oslo tomorrow?",
        "How is the weather in Oslo on Sunday?",
        "How is the weather in Rome today?",
        "How is the weather in Cairo on Friday?",
        "How do I make soup?",
        "How do I make pancakes?",
        "What did Ada do on Monday?",
        "What did Ada do on Tuesday?",
        "What did Milo do on Saturday?",
        "What did Greta do on Sunday?",
    ]
    start = "Once there was a red fox named Hugo who lived in the den. One Friday Hugo went to the"
    plain = [
        start,
        f"{start} harbour",
        f"{start} forest",
        f"{start} library and found a",
        "In Oslo it will be",
        "In the morning Emma was at the",
        "In the morning Emma was at the market and",
        "The capital of",
        "def add(",
    ]
    rows: list[dict[str, object]] = [{"messages": [{"role": "user", "content": text}]} for text in chat]
    return rows + [{"prompt": text} for text in plain]
