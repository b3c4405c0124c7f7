"""Languages that are spoken, as clients name them."""

from __future__ import annotations

from typing import Final

from omni_cluster.openai_api.errors import invalid
from omni_cluster.openai_api.wire import shown

_LISTED: Final = (
    "af:Afrikaans am:Amharic ar:Arabic as:Assamese az:Azerbaijani ba:Bashkir be:Belarusian bg:Bulgarian bn:Bengali "
    "bo:Tibetan br:Breton bs:Bosnian ca:Catalan cs:Czech cy:Welsh da:Danish de:German el:Greek en:English "
    "es:Spanish et:Estonian eu:Basque fa:Persian fi:Finnish fil:Filipino fo:Faroese fr:French gl:Galician "
    "gu:Gujarati ha:Hausa haw:Hawaiian he:Hebrew hi:Hindi hr:Croatian ht:Haitian hu:Hungarian hy:Armenian "
    "id:Indonesian is:Icelandic it:Italian ja:Japanese jv:Javanese jw:Javanese ka:Georgian kk:Kazakh km:Khmer "
    "kn:Kannada ko:Korean la:Latin lb:Luxembourgish ln:Lingala lo:Lao lt:Lithuanian lv:Latvian mg:Malagasy "
    "mi:Maori mk:Macedonian ml:Malayalam mn:Mongolian mr:Marathi ms:Malay mt:Maltese my:Burmese nb:Norwegian "
    "ne:Nepali nl:Dutch nn:Nynorsk no:Norwegian oc:Occitan pa:Punjabi pl:Polish ps:Pashto pt:Portuguese "
    "ro:Romanian ru:Russian sa:Sanskrit sd:Sindhi si:Sinhala sk:Slovak sl:Slovenian sn:Shona so:Somali sq:Albanian "
    "sr:Serbian su:Sundanese sv:Swedish sw:Swahili ta:Tamil te:Telugu tg:Tajik th:Thai tk:Turkmen tl:Tagalog "
    "tr:Turkish tt:Tatar uk:Ukrainian ur:Urdu uz:Uzbek vi:Vietnamese yi:Yiddish yo:Yoruba yue:Cantonese zh:Chinese"
)
_BY_CODE: Final = dict(entry.split(":") for entry in _LISTED.split())
_NAMES: Final = frozenset(_BY_CODE.values())


def language_name(value: str, param: str) -> str:
    """The English name of a language by its code (`en`, `en-US`), or by that name.

    Raises BadRequest that names `param`.
    """
    name = _BY_CODE.get(value.replace("_", "-").partition("-")[0].lower(), value.capitalize())
    if name not in _NAMES:
        raise invalid(
            param, f"{param} is {shown(value)}, but it should be an ISO 639-1 code such as 'en', or an English name."
        )
    return name
