#!/usr/bin/env bash
# An answer by voice, into a file: chat_spoken.sh [FILE]
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}" "${MODEL:=preset:toy}"
file=${1:-answer.wav}

answer=$(
curl --fail-with-body -sS "$BASE_URL/v1/chat/completions" \
  -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" -d @- <<END
{
  "model": "$MODEL",
  "messages": [{"role": "user", "content": "Hello world."}],
  "modalities": ["text", "audio"],
  "audio": {"voice": "Chelsie", "format": "wav"}
}
END
) || { echo "$answer" >&2; exit 1; }
sed -E 's/.*"data": ?"([^"]*)".*/\1/' <<<"$answer" | base64 -d >"$file"
sed -E 's/"data": ?"[^"]*"/"data":"..."/' <<<"$answer"
