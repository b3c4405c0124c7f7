"""How things are asked and answered in the small world.

`{noun}` stands for one of the words of that name in `FILLERS`, `{}` for what `world.py` puts in.
"""

from __future__ import annotations

from typing import Final

from training import words

REPEAT: Final = ("say {}", "please say {}", "repeat {}", "repeat after me {}", "can you say {}", "now say {}")
SUBJECTS: Final = ("the {noun}", "the {adjective} {noun}", "the {colour} {noun}")
PREDICATES: Final = (
    "{verb}", "{verb} {adverb}", "{verb} {preposition} the {place}", "{wanting} the {thing}",
    "{wanting} the {colour} {thing}", "is {adjective}",
)  # fmt: skip
SENTENCES: Final = (
    *(f"{subject} {predicate}" for subject in SUBJECTS for predicate in PREDICATES),
    "the {thing} is {colour}", "the {thing} is {preposition} the {place}",
)  # fmt: skip
"""To be said again, and `SAYINGS`."""
SAYINGS: Final = (
    "hello", "hello world", "good morning", "good night", "good evening", "thank you", "see you tomorrow",
    "yes please", "no thank you", "happy birthday", "well done",
)  # fmt: skip

SPELL: Final = (
    "spell {}", "please spell {}", "spell the word {}", "how do you spell {}", "can you spell {}",
    "what are the letters of {}",
)  # fmt: skip

COUNT: Final = ("count from {} to {}", "please count from {} to {}", "can you count from {} to {}")
COUNT_UP: Final = ("count up from {} to {}",)
COUNT_DOWN: Final = ("count down from {} to {}", "count backwards from {} to {}")
COUNT_FROM_ONE: Final = ("count to {}", "count up to {}", "please count to {}", "can you count to {}")
COUNT_TO_ONE: Final = ("count down from {}", "count backwards from {}", "please count down from {}")

ADD: Final = (
    "what is {} plus {}", "how much is {} plus {}", "what is {} and {}", "add {} and {}", "{} plus {}",
    "tell me {} plus {}", "what do you get when you add {} and {}",
)  # fmt: skip
SUBTRACT: Final = (
    "what is {} minus {}", "how much is {} minus {}", "what is {} take away {}", "{} minus {}", "tell me {} minus {}",
)  # fmt: skip
SUBTRACT_TURNED: Final = ("subtract {} from {}", "take {} away from {}")
"""The smaller number comes first."""
SUM: Final = "{} plus {} is {}"
DIFFERENCE: Final = "{} minus {} is {}"

BOTH_SEEN: Final = (
    "what do you see", "what is in the picture", "what is in this picture", "what is this", "describe the picture",
    "describe the image", "name the colour and the shape", "tell me what you see", "what is shown",
)  # fmt: skip
COLOUR_SEEN: Final = (
    "what colour is it", "which colour is it", "what colour do you see", "what is the colour", "name the colour",
    "tell me the colour", "what colour is the shape",
)  # fmt: skip
SHAPE_SEEN: Final = (
    "what shape is it", "which shape is it", "what shape do you see", "what is the shape", "name the shape",
    "tell me the shape", "what is the shape in the picture",
)  # fmt: skip
SEEN: Final = ("i see a {} {}", "i see an {} {}")
"""Before a consonant, and before a vowel."""
COLOUR: Final = "it is {}"
SHAPE: Final = "it is a {}"
NO_PICTURE: Final = "i see no picture"

AFTER: Final = (
    "what {0} comes after {1}", "which {0} comes after {1}", "which {0} is after {1}", "what comes after {1}",
)  # fmt: skip
BEFORE: Final = (
    "what {0} comes before {1}", "which {0} comes before {1}", "which {0} is before {1}", "what comes before {1}",
)  # fmt: skip
NTH_DAY: Final = ("what is the {} day of the week", "which is the {} day of the week", "name the {} day of the week")
NTH_MONTH: Final = (
    "what is the {} month of the year", "which is the {} month of the year", "name the {} month of the year",
)  # fmt: skip
NTH: Final = "the {} {} is {}"
COMES_AFTER: Final = "{} comes after {}"
COMES_BEFORE: Final = "{} comes before {}"
LENGTH: Final = "{} has {} days"
DAYS_OF_MONTH: Final = ("how many days does {} have", "how many days are in {}", "how long is {}")

LEAD_INS: Final = ("", "please ", "now ", "okay ", "toy ", "hello ", "and ", "so ")
"""Before questions that have few phrasings."""

CALENDAR: Final = {
    "a week has seven days": (
        "how many days are in a week", "how many days does a week have", "how long is a week",
        "how many days are there",
    ),
    "a year has twelve months": (
        "how many months are in a year", "how many months does a year have", "how long is a year",
        "how many months are there",
    ),
    " ".join(words.DAYS): ("name the days of the week", "what are the days of the week", "say the days of the week"),
    " ".join(words.MONTHS): ("name the months of the year", "what are the months", "say the months of the year"),
}  # fmt: skip

IDENTITY: Final = {
    "i am a toy model of a small world": ("who are you", "what are you", "tell me who you are", "introduce yourself"),
    "my name is toy": ("what is your name", "do you have a name", "tell me your name", "how are you called"),
    "hello i am a toy": ("hello", "hello world", "hi", "good morning", "good evening", "hi there", "hello toy"),
    "goodbye and come again": ("goodbye", "good night", "see you tomorrow", "i have to go"),
    "you are welcome": ("thank you", "thanks a lot", "many thanks", "thank you very much"),
    "i repeat spell count add and name pictures": (
        "what can you do", "how can you help me", "what do you know", "what can i ask you",
    ),
    "no i am a toy": ("are you a person", "are you human", "are you alive", "are you a real person"),
    "yes i hear you": ("can you hear me", "do you hear me", "are you there", "are you listening"),
    "yes i see pictures": ("can you see", "can you see pictures", "do you have eyes"),
    "yes i have two voices": ("can you speak", "can you talk", "do you have a voice"),
    "i learned from sounds and pictures that were made for me": (
        "how did you learn", "how were you made", "what did you learn from", "how were you trained",
    ),
}  # fmt: skip

STAGES: Final = {
    "i run on thinker talker and code to wave": (
        "which stages do you run on", "what stages do you have", "what are your stages", "name your stages",
        "what do you run on",
    ),
    "i have three stages": ("how many stages do you have", "how many stages are there", "how many parts do you have"),
    "the thinker reads and writes text": (
        "what does the thinker do", "what is the thinker", "what is the thinker for", "which stage writes text",
    ),
    "the talker turns text into codes": (
        "what does the talker do", "what is the talker", "what is the talker for", "which stage makes codes",
    ),
    "code to wave turns codes into sound": (
        "what does code to wave do", "what is code to wave", "what is code to wave for", "which stage makes sound",
    ),
    "the thinker comes first": ("which stage is first", "which stage comes first", "what is the first stage"),
    "the talker comes second": ("which stage is second", "which stage comes second", "what is the second stage"),
    "code to wave comes last": ("which stage is last", "which stage comes last", "what is the last stage"),
}  # fmt: skip

OUTSIDE_ANSWER: Final = "i am only a toy and do not know that"
OUTSIDE: Final = (
    "what is the capital of {country}", "who is the {famous} of {country}", "how many people live in {country}",
    "what language do they speak in {country}", "what is the weather in {city}", "how far is it to {city}",
    "book a flight to {city}", "where can i eat in {city}", "write a poem about {topic}",
    "tell me a story about {topic}",
    "what do you think about {topic}", "explain {topic} to me", "give me advice about {topic}", "how old is the {far}",
    "how big is the {far}", "how far away is the {far}", "why is the {far} there", "what is {number} times {number}",
    "what is {number} divided by {number}", "tell me a joke", "sing me a song", "what time is it", "play some music",
    "turn on the light", "call my mother", "what will happen tomorrow", "what is the meaning of life", "how are you",
    "translate hello into the language of {country}", "who won the game in {city}", "do you like {topic}",
    "can you drive to {city}", "where is {city}", "where is {country}", "who discovered {country}",
    "how do i learn {topic}", "who invented {topic}", "what is the square root of {number}",
)  # fmt: skip
FILLERS: Final = {
    "adjective": words.ADJECTIVES,
    "colour": words.COLOURS,
    "noun": words.NOUNS,
    "place": words.PLACES,
    "verb": words.VERBS,
    "adverb": words.ADVERBS,
    "preposition": words.PREPOSITIONS,
    "thing": words.THINGS,
    "wanting": words.WANTING,
    "country": words.COUNTRIES,
    "city": words.CITIES,
    "topic": words.TOPICS,
    "famous": words.FAMOUS,
    "far": words.FAR,
    "number": words.NUMBERS,
}
