"""The text sides of the talker's prompt, and where they are: the user's turns, then the beginning of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from omni_cluster.models.qwen3_omni.fine_positions import as_floats, packed
from omni_cluster.models.qwen3_omni.talker_ids import TextIds
from omni_cluster.types.errors import PayloadError, RequestError, TokenError
from omni_cluster.types.rows import Rows

HEADER = 3
"""Tokens that begin the assistant's turn: the mark, its role, and the line's end."""
PADS = 4


def answer_start(prompt_ids: Sequence[int], ids: TextIds) -> int:
    """Where the last turn of the assistant begins; RequestError for a prompt without one."""
    for place in range(len(prompt_ids) - 2, -1, -1):
        if (prompt_ids[place], prompt_ids[place + 1]) == (ids.im_start, ids.assistant):
            return place
    raise RequestError("the prompt begins no turn of the assistant, so nothing can be spoken; end it with one.")


def check_ids(token_ids: Sequence[int], num_ids: int) -> None:
    """Raises TokenError for a token that is none of the thinker's."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < num_ids:
        wrong = next(i for i in token_ids if not 0 <= i < num_ids)
        raise TokenError(f"token {wrong} is none of the thinker's; they are 0 to {num_ids - 1}.")


def prompt_rows(
    token_ids: Sequence[int], positions: np.ndarray | None, media_rows: Sequence[Rows], ids: TextIds
) -> list[Rows]:
    """Parts that follow each other, the first with all positions.

    `token_ids`: of the thinker's prompt up to the header of the answer, and the reply's first one. `positions` int64
    `[3, P]`: what `user_positions` makes of the prompt, packed; None where they count the tokens. `media_rows`: the
    thinker's.
    """
    prompt = np.array(token_ids[:-1], np.int64)
    is_user = user_turns(prompt, ids)
    rows = _user_rows(prompt, np.flatnonzero(is_user), media_rows, ids)
    *header, first = token_ids[-HEADER - 1 :]
    answer = [*header, *[ids.pad] * PADS, ids.bos, first]
    rows.append(Rows.of_ids(rows[-1].end if rows else 0, answer))
    if positions is not None:
        of_users = as_floats(positions[:, : len(prompt)][:, is_user[: positions.shape[1]]])
        is_media = np.isin(prompt[is_user], ids.media)
        rows[0] = replace(rows[0], positions=packed(talker_positions(of_users, is_media, len(answer))))
    return rows


def user_turns(prompt_ids: np.ndarray, ids: TextIds) -> np.ndarray:
    """Which positions are of turns of the user, each up to the mark of the next turn, bool `[P]`."""
    place = np.arange(len(prompt_ids))
    mark = np.maximum.accumulate(np.where(prompt_ids == ids.im_start, place, 0))
    is_user: np.ndarray = prompt_ids[np.minimum(mark + 1, len(place) - 1)] == ids.user
    return is_user


def talker_positions(of_users: np.ndarray, is_media: np.ndarray, following: int) -> np.ndarray:
    """All of the talker's prompt, float32 `[3, n]`: `of_users` `[3, m]`, and of `following` tokens behind them.

    transformers counts these on from where the text behind the last of the media begins. `is_media` bool `[m]`.
    """
    length, media = len(is_media), np.flatnonzero(is_media)
    # Behind the media and their closing mark, if anything is.
    first = min(int(media[-1]) + 2, length - 1) if len(media) else 0
    start = of_users[:, first : first + 1].max(initial=0)
    answer = start + np.arange(length - first, length - first + following, dtype=np.float32)
    return np.concatenate([of_users, np.broadcast_to(answer, (3, following))], axis=1)


def _user_rows(prompt: np.ndarray, places: np.ndarray, media_rows: Sequence[Rows], ids: TextIds) -> list[Rows]:
    """Of the prompt's `places`, a part for each run of ids or of rows."""
    is_media = np.isin(prompt[places], ids.media)
    edges = [0, *(np.flatnonzero(np.diff(is_media)) + 1).tolist(), len(places)] if len(places) else []
    of_media = Rows.joined(media_rows) if is_media.any() and media_rows else None
    return [
        _rows_of(places[first:end], first, of_media)
        if is_media[first]
        else Rows.of_ids(first, prompt[places[first:end]].tolist())
        for first, end in pairwise(edges)
    ]


def _rows_of(places: np.ndarray, start: int, of_media: Rows | None) -> Rows:
    """The thinker's rows of a run of its prompt, which follow each other, as the talker's from `start` on."""
    at = places[:0] if of_media is None else of_media.at
    first = int(np.searchsorted(at, places[0]))
    found = at[first : first + len(places)]
    number = int((found == places[: len(found)]).sum())
    if of_media is None or number != len(places):
        raise PayloadError(
            f"Media at {places[0]} to {places[-1]} of a prompt have {number} hidden states; "
            f"each of the {len(places)} positions needs one."
        )
    return Rows(of_media.kind, of_media.dtype, start, of_media.raw[first : first + number])
