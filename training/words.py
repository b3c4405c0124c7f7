"""The words of the small world, by what they are for.

None of them sounds like another one, so that whatever is said has one spelling: no "sea", "sun", "red" of a book.
Numbers are the exception: "to" and "two", "for" and "four" are told apart by the sentence.
"""

from __future__ import annotations

from typing import Final


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NUMBERS: Final = _listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
DAYS: Final = _listed("monday tuesday wednesday thursday friday saturday sunday")
MONTHS: Final = _listed("january february march april may june july august september october november december")
MONTH_DAYS: Final = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
LARGE_NUMBERS: Final = {28: "twenty eight", 30: "thirty", 31: "thirty one"}
ORDINALS: Final = _listed("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")

COLOURS: Final = _listed("red green blue yellow orange purple pink brown")
SHAPES: Final = _listed("circle square triangle star cross ring")

ADJECTIVES: Final = _listed(
    "big little old young happy sad quiet angry hungry clever lazy funny brave gentle silver golden"
)
NOUNS: Final = _listed(
    "bird cat dog horse fish mouse tiger monkey rabbit camel king queen doctor teacher farmer child robot dragon"
)
PLACES: Final = _listed(
    "table river garden mountain window kitchen bridge forest castle school market island ship train tower street"
)
VERBS: Final = _listed("sings sleeps dances runs jumps smiles waits works talks laughs hides swims")
ADVERBS: Final = _listed("slowly quickly softly loudly gladly today tomorrow often happily again")
PREPOSITIONS: Final = _listed("under near behind over beside")
THINGS: Final = _listed("apple bread cheese cup book lamp clock shoe bottle box paper pencil music milk water letter")
WANTING: Final = _listed("likes wants needs has finds brings")

LETTERS: Final = tuple("abcdefghijklmnopqrstuvwxyz")
SPELLED: Final = (
    *NOUNS, *PLACES, *THINGS, *COLOURS, *SHAPES, *NUMBERS[1:11], *DAYS, "toy", "happy", "zebra", "quiz", "fox",
    "jacket",
)  # fmt: skip

COUNTRIES: Final = _listed("france spain italy japan india china brazil egypt kenya canada norway poland")
CITIES: Final = _listed("paris london berlin tokyo madrid rome cairo boston vienna lima")
TOPICS: Final = _listed(
    "love money football history physics politics war dinner winter dreams flowers lions computers chess school"
)
FAMOUS: Final = ("president", "prime minister", "best singer", "first painter", "richest man", "oldest woman")
FAR: Final = ("moon", "earth", "nearest star", "ocean", "universe", "north pole", "highest mountain", "longest river")
