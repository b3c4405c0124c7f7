#!/usr/bin/env bash
# A spoken question: chat_sound.sh [SOUND]
set -euo pipefail
: "${BASE_URL:=http://127.0.0.1:8000}" "${API_KEY:=none}" "${MODEL:=preset:toy}"
sound=${1:-$(dirname "$0")/../speech.wav}

curl --fail-with-body -sS "$BASE_URL/v1/chat/completions" \
  -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" -d @- <<END
{
  "model": "$MODEL",
  "messages": [{"role": "user", "content": [
    {"type": "input_audio", "input_audio": {"format": "wav", "data": "$(base64 <"$sound" | tr -d '\n')"}}
  ]}]
}
END
echo
