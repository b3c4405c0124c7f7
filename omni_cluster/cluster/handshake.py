"""How both ends of a connection show each other that they know the replica's secret, without saying it.

Each proves it over what the other one has just made up, so that who listened to one greeting cannot repeat it.
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
    """The replica's side: whether who connected proves it in time. Only then the replica proves it too."""
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
    """The reader's side. ConnectionError for one that listens in the replica's place, TimeoutError for a silent one."""
    async with asyncio.timeout(GREETING_S):
        asked = await reader.readexactly(NONCE_BYTES)
        own = secrets.token_bytes(NONCE_BYTES)
        writer.write(own + _proof(secret, _READER, asked, own))
        proof = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, _REPLICA, asked, own)):
        raise ConnectionError("who listens there does not know the replica's secret")


def _proof(secret: bytes, side: bytes, asked: bytes, own: bytes) -> bytes:
    """The side is in it: a proof that came cannot be sent back as one's own."""
    return hmac.digest(secret, side + asked + own, "sha256")
