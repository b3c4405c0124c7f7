"""How both ends of a connection prove that they know the replica's secret, without sending it.

Each end answers a challenge that the other has just made up, so a handshake that was overheard cannot be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets

GREETING_S = 5.0
"""How long both proofs may take together."""
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

_READER, _REPLICA = b"reader", b"replica"


async def peer_knows_secret(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> bool:
    """The replica's side. Returns whether the peer proves it in time; only then the replica proves it too."""
    asked = secrets.token_bytes(NONCE_BYTES)
    writer.write(asked)
    try:
        async with asyncio.timeout(GREETING_S):
            answered = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
    except (asyncio.IncompleteReadError, TimeoutError, ConnectionError):
        return False
    own, proof = answered[:NONCE_BYTES], answered[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, _READER, asked, own)):
        return False
    writer.write(_proof(secret, _REPLICA, asked, own))
    return True


async def prove_secret(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """The reader's side. Raises ConnectionError for an impostor, TimeoutError for a peer that is silent."""
    async with asyncio.timeout(GREETING_S):
        asked = await reader.readexactly(NONCE_BYTES)
        own = secrets.token_bytes(NONCE_BYTES)
        writer.write(own + _proof(secret, _READER, asked, own))
        proof = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, _REPLICA, asked, own)):
        raise ConnectionError("who listens there does not know the replica's secret")


def _proof(secret: bytes, side: bytes, asked: bytes, own: bytes) -> bytes:
    """The proof contains the side, so that a peer cannot send our own proof back to us."""
    return hmac.digest(secret, side + asked + own, "sha256")
